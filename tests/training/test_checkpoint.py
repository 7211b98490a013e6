"""A checkpoint is there whole or not at all, and what is not sound is refused."""

import hashlib
import io
import os
import random
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from groupwise.errors import UserError
from groupwise.training.checkpoint import load_checkpoint, load_newest, previous, save_checkpoint
from groupwise.training.plain import plain
from tests.forks import Command
from tests.waiting import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


@pytest.fixture
def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on torch writes the beginning of a file, and says what it says of a full disk."""

    def fail(state: object, file: BinaryIO) -> None:
        file.write(b"PK")
        raise RuntimeError("disk full")

    return lambda: monkeypatch.setattr(torch, "save", fail)


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


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_text(path: Path, kind: Callable[[Path], str | Path]) -> None:
    for step in (1, 2):
        save_checkpoint(kind(path), {"step": step}, keep=kind(previous(path)))
    assert [load_checkpoint(kind(p))["step"] for p in (path, previous(path))] == [2, 1]


def test_numbers_of_numpy_are_written_as_pythons(path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    state = {
        "model": model.state_dict(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=np.logspace(-2, -1, 2)[0]).state_dict(),
        "metrics": {np.int64(3): (np.float32(0.5), [np.True_, {np.str_("a")}, np.bytes_(b"b")])},
        "extra": OrderedDict(weight=model.weight, best=np.float64(0.1)),
    }
    save_checkpoint(path, state)
    read = load_checkpoint(path)
    [group] = read["optimizer"]["param_groups"]
    assert type(group["lr"]) is float and group["lr"] == 0.01
    assert repr(read["metrics"]) == repr({3: (0.5, [True, {"a"}, b"b"])})
    assert type(read["extra"]["best"]) is float and torch.equal(read["extra"]["weight"], model.weight)
    assert type(state["extra"]["best"]) is np.float64, "what is written is the caller's, and stays as it is"


def test_tensors_are_not_copied_and_a_modules_state_keeps_its_version() -> None:
    model = torch.nn.Linear(2, 1)
    state = model.state_dict()
    assert plain(state) is state
    state["_extra_state"] = np.float64(1.0)
    made = plain({"model": state})["model"]
    assert made["weight"] is state["weight"] and type(made["_extra_state"]) is float
    assert made._metadata is state._metadata and list(made) == list(state)


@pytest.mark.parametrize(
    "value",
    [np.arange(3), np.longdouble(1), Path("x"), lambda: 0, slice(1), frozenset({1}), torch.nn.Linear(1, 1)],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_be_read_is_not_written(path: Path, value: object) -> None:
    save_checkpoint(path, {"step": 1})
    with pytest.raises(UserError, match=r"cannot hold this state \(.+\), which is not read back") as caught:
        save_checkpoint(path, {"step": 2, "scheduler": {"order": [0, value]}}, keep=previous(path))
    assert "\n" not in str(caught.value)
    assert load_checkpoint(path) == {"step": 1} and list(path.parent.iterdir()) == [path]


def test_what_torch_reads_is_written_though_it_is_not_plain(path: Path) -> None:
    state = {"complex": 1j, "dtype": torch.float16, "shape": torch.Size([2]), "counts": Counter("aab"), "none": None}
    save_checkpoint(path, state)
    assert load_checkpoint(path) == state


def test_a_write_that_fails_leaves_the_previous_checkpoint_and_no_litter(
    path: Path, fill_the_disk: Callable[[], None]
) -> None:
    save_checkpoint(path, {"step": 1})
    fill_the_disk()
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(path, {"step": 2})
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
    with pytest.raises(UserError, match=r"is whole, but \w+\.mkdir in it is not read, as that could run code"):
        load_checkpoint(path)
    assert not (path.parent / "pwned").exists()


def test_a_whole_file_that_holds_an_array_is_not_called_truncated(path: Path) -> None:
    """As earlier versions wrote it."""
    path.write_bytes(with_sum({"order": np.arange(3)}))
    with pytest.raises(UserError, match=r"is whole, but numpy\S+ in it is not read") as caught:
        load_checkpoint(path)
    assert "afresh" not in str(caught.value) and "\n" not in str(caught.value)


def with_sum(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue() + b"\nsha256 " + hashlib.sha256(file.getvalue()).hexdigest().encode()


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


def test_a_write_that_fails_leaves_both(two: Path, fill_the_disk: Callable[[], None]) -> None:
    (two.parent / "a folder").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(two.parent / "a folder", {"step": 4}, keep=None)
    fill_the_disk()
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(two, {"step": 4}, keep=previous(two))
    assert [load_checkpoint(p)["step"] for p in (two, previous(two))] == [3, 2]


@pytest.mark.parametrize("harm", ["altered", "gone"])
def test_the_one_before_it_takes_its_place_with_one_warning(
    two: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    two.unlink() if harm == "gone" else two.write_bytes(two.read_bytes()[:-1])
    assert load_newest(two) == (previous(two), {"step": 2})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and line.endswith("; resuming from the one before it.")


def test_with_both_altered_the_run_is_refused(two: Path) -> None:
    for path in (two, previous(two)):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint\.pt is truncated or altered: start afresh with overwrite=true"):
        load_newest(two)


def test_files_beside_it_that_are_no_good_count_too(two: Path) -> None:
    def read(path: Path) -> dict[str, Any]:
        if (state := load_checkpoint(path))["step"] == 3:
            raise UserError("its stage is altered: mend it.")
        return state

    assert load_newest(two, read) == (previous(two), {"step": 2})
