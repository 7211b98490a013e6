"""A checkpoint is there whole or not at all, and what is not sound is refused."""

import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.errors import UserError
from groupwise.training.checkpoint import load_checkpoint, load_newest, previous, save_checkpoint
from tests.forks import Command
from tests.waiting import until


class Unwritable:
    def __reduce__(self) -> str:
        raise RuntimeError("disk full")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


def test_what_is_written_is_read_back_bit_by_bit(path: Path) -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "thresholds": torch.tensor([0.1, 1e-30], dtype=torch.float64),
        "generator": torch.get_rng_state(),
        "noise_key": b"\x00\xffkey",
        "step": 12,
        "epsilon": float("inf"),
        "plan": {"adjacency": "add_remove", "notes": [1, 2.5, None, True]},
    }
    save_checkpoint(path, state)
    read = load_checkpoint(path)
    plain = ("noise_key", "step", "epsilon", "plan", "schedule")
    assert [read.pop(name) for name in plain] == [state.pop(name) for name in plain]
    torch.testing.assert_close(read, state, rtol=0, atol=0)


def test_only_the_owner_may_read_it_because_it_holds_the_key_of_the_noise(path: Path) -> None:
    save_checkpoint(path, {"step": 1})
    assert path.stat().st_mode & 0o077 == 0


def test_a_write_that_fails_leaves_the_previous_checkpoint_and_no_litter(path: Path) -> None:
    save_checkpoint(path, {"step": 1})

    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(path, {"step": 2, "bad": Unwritable()})
    assert load_checkpoint(path) == {"step": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(tmp_path / "absent" / "checkpoint.pt", {})


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused(path: Path, share: float) -> None:
    save_checkpoint(path, {"weights": torch.randn(5000)})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="truncated or altered"):
        load_checkpoint(path)


def test_one_flipped_bit_is_noticed(path: Path) -> None:
    save_checkpoint(path, {"weights": torch.randn(5000)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="truncated or altered"):
        load_checkpoint(path)


def test_a_missing_or_foreign_file_is_a_users_mistake(path: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint"):
        load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="holds a list"):
        load_checkpoint(path)
    path.write_text("not a checkpoint")
    with pytest.raises(UserError, match="truncated or altered"):
        load_checkpoint(path)


def test_code_in_a_checkpoint_is_not_run(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(path.parent / "pwned"),)

    torch.save({"evil": Evil()}, path)
    with pytest.raises(UserError, match="truncated or altered"):
        load_checkpoint(path)
    assert not (path.parent / "pwned").exists()


def test_killed_at_any_moment_a_whole_checkpoint_remains(path: Path) -> None:
    writer = path.parent / "writer.py"
    writer.write_text(
        "import sys, torch\nfrom pathlib import Path\nfrom groupwise.training.checkpoint import save_checkpoint\n"
        "for step in range(10**6):\n"
        "    save_checkpoint(Path(sys.argv[1]), {'step': step, 'weights': torch.full((200_000,), float(step))})\n"
    )
    process = Command(str(writer), str(path), cwd=path.parent)
    until(path.exists, "a checkpoint")
    time.sleep(0.137)  # some more; how many does not matter
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = load_checkpoint(path)
    assert torch.all(state["weights"] == state["step"])


def test_it_ends_with_its_sha256_and_torch_reads_it_all_the_same(path: Path) -> None:
    save_checkpoint(path, {"step": 1})
    content = path.read_bytes()
    assert content[-72:] == b"\nsha256 " + hashlib.sha256(content[:-72]).hexdigest().encode()
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_every_byte_of_it_matters(path: Path) -> None:
    """The sums inside a zip file miss its names and its table of contents; the SHA-256 misses nothing."""
    save_checkpoint(path, {"weights": torch.arange(9.0), "noise_key": b"key"})
    content = path.read_bytes()
    chance = random.Random(0)
    for place in {*chance.sample(range(len(content)), 60), *range(len(content) - 100, len(content))}:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(UserError, match="truncated or altered"):
            load_checkpoint(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match="truncated or altered"):
        load_checkpoint(path)


def test_weights_that_torch_alone_wrote_are_read_too(path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, path)
    assert torch.equal(load_checkpoint(path)["weight"], torch.ones(2))


@pytest.fixture
def two(path: Path) -> Path:
    """A checkpoint, and the one before it."""
    for step in (1, 2, 3):
        save_checkpoint(path, {"step": step}, keep=previous(path))
    return path


def test_the_one_before_it_is_kept(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [load_checkpoint(p)["step"] for p in (two, previous(two))] == [3, 2]
    assert sorted(p.name for p in two.parent.iterdir()) == ["checkpoint-previous.pt", "checkpoint.pt"]
    assert load_newest(two) == (two, {"step": 3})
    assert capsys.readouterr().err == ""


def test_a_write_that_fails_leaves_both(two: Path) -> None:
    (two.parent / "a folder").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(two.parent / "a folder", {"step": 4}, keep=None)
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(two, {"step": 4, "bad": Unwritable()}, keep=previous(two))
    assert [load_checkpoint(p)["step"] for p in (two, previous(two))] == [3, 2]


@pytest.mark.parametrize("harm", ["altered", "gone"])
def test_the_one_before_it_takes_its_place_with_one_warning(
    two: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    two.unlink() if harm == "gone" else two.write_bytes(two.read_bytes()[:-1])
    assert load_newest(two) == (previous(two), {"step": 2})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and line.endswith("; going on from the one before it.")


def test_with_both_altered_the_run_is_refused(two: Path) -> None:
    for path in (two, previous(two)):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint\.pt is truncated or altered: start afresh with overwrite=true"):
        load_newest(two)


def test_files_beside_it_that_are_no_good_count_too(two: Path) -> None:
    def check(path: Path, state: dict[str, Any]) -> None:
        if state["step"] == 3:
            raise UserError("its stage is altered: mend it.")

    assert load_newest(two, check=check) == (previous(two), {"step": 2})
