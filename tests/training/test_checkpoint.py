"""Checkpoints are written atomically, the previous one is kept, and altered files are refused."""

import random
import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from groupwise.errors import UserError
from groupwise.training.checkpoint import load_checkpoint, load_newest, previous, save_checkpoint
from tests.forks import Command
from tests.waiting import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_is_read_back_bit_for_bit(path: Path) -> None:
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


def test_numpy_numbers_are_written_as_python_numbers(path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    state = {
        "model": model.state_dict(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=np.logspace(-2, -1, 2)[0]).state_dict(),
        "metrics": {3: (np.float32(0.5), [np.True_, np.str_("a"), np.bytes_(b"b")])},
        "extra": OrderedDict(weight=model.weight, best=np.float64(0.1)),
    }
    save_checkpoint(path, state)
    read = load_checkpoint(path)
    [group] = read["optimizer"]["param_groups"]
    assert type(group["lr"]) is float and group["lr"] == 0.01
    assert repr(read["metrics"]) == repr({3: (0.5, [True, "a", b"b"])})
    assert type(read["extra"]["best"]) is float and torch.equal(read["extra"]["weight"], model.weight)
    assert type(state["extra"]["best"]) is np.float64, "the caller's state is unchanged"


@pytest.mark.parametrize(
    "value",
    [np.arange(3), np.longdouble(1), Path("x"), lambda: 0, slice(1), frozenset({1}), torch.nn.Linear(1, 1)],
    ids=lambda value: type(value).__name__,
)
def test_a_state_that_could_not_be_read_back_is_not_written(path: Path, value: object) -> None:
    save_checkpoint(path, {"step": 1})
    with pytest.raises(UserError, match=r"cannot store this state \(.+\), as reading it back") as caught:
        save_checkpoint(path, {"step": 2, "scheduler": {"order": [0, value]}}, keep=previous(path))
    assert "\n" not in str(caught.value)
    assert load_checkpoint(path) == {"step": 1} and list(path.parent.iterdir()) == [path]


def test_a_missing_or_foreign_file_raises_a_user_error(path: Path) -> None:
    with pytest.raises(UserError, match="There is no checkpoint"):
        load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="contains a list"):
        load_checkpoint(path)
    path.write_text("not a checkpoint")
    with pytest.raises(UserError, match="truncated or altered"):
        load_checkpoint(path)


def test_a_kill_while_writing_leaves_a_complete_checkpoint(path: Path) -> None:
    writer = path.parent / "writer.py"
    writer.write_text(
        "import sys, torch\nfrom pathlib import Path\nfrom groupwise.training.checkpoint import save_checkpoint\n"
        "for step in range(10**6):\n"
        "    save_checkpoint(Path(sys.argv[1]), {'step': step, 'weights': torch.full((200_000,), float(step))})\n"
    )
    process = Command(str(writer), str(path), cwd=path.parent)
    until(path.exists, "a checkpoint")
    time.sleep(0.137)  # it writes some more meanwhile
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = load_checkpoint(path)
    assert torch.all(state["weights"] == state["step"])


def test_a_flipped_bit_is_detected_or_changes_nothing(path: Path) -> None:
    """The checksums in a zip file do not cover dates and padding."""
    state = {"weights": torch.arange(9.0), "noise_key": b"key"}
    save_checkpoint(path, state)
    content = path.read_bytes()
    detected = 0
    chance = random.Random(0)
    for place in {*chance.sample(range(len(content)), 60), *range(len(content) - 100, len(content))}:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:
            torch.testing.assert_close(load_checkpoint(path), state, rtol=0, atol=0)
        except UserError as error:
            assert "truncated or altered" in str(error)
            detected += 1
    assert detected > 50


@pytest.fixture
def two(path: Path) -> Path:
    """A checkpoint, and the one before it."""
    for step in (1, 2, 3):
        save_checkpoint(path, {"step": step}, keep=previous(path))
    return path


def test_the_previous_checkpoint_is_kept(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [load_checkpoint(p)["step"] for p in (two, previous(two))] == [3, 2]
    assert sorted(p.name for p in two.parent.iterdir()) == ["checkpoint-previous.pt", "checkpoint.pt"]
    assert load_newest(two) == (two, {"step": 3})
    assert capsys.readouterr().err == ""


def test_a_failed_write_leaves_both_checkpoints(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(state: object, file: BinaryIO) -> None:
        file.write(b"PK")
        raise RuntimeError("disk full")

    (two.parent / "a folder").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(two.parent / "a folder", {"step": 4}, keep=None)
    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(two, {"step": 4}, keep=previous(two))
    assert [load_checkpoint(p)["step"] for p in (two, previous(two))] == [3, 2]


@pytest.mark.parametrize("harm", ["altered", "gone"])
def test_the_previous_checkpoint_is_loaded_with_one_warning(
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
