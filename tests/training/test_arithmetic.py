"""The arithmetic of a GPU is what was asked for, and afterwards what it was; seen here in torch's own settings."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.backends import cuda, cudnn

from groupwise.clipping.precision import full_float32, with_tf32
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.errors import UserError
from groupwise.training.arithmetic import arithmetic
from groupwise.training.from_config import autocast
from tests.tiny_training import FLAT, GHOST, trainer_of
from tests.training.test_step import ToyTask

CUDA = torch.device("cuda", 0)
"""Named, never used: settings need no GPU."""


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(autouse=True)
def _as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with with_tf32(False):
        yield


@pytest.mark.parametrize("before", [(False, True), (True, True), (False, False), (True, False)])
def test_a_run_is_without_tf32_and_leaves_the_settings_as_they_were(before: tuple[bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    with arithmetic(CUDA):
        assert settings() == (False, False)
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        with autocast("tf32", CUDA)():
            assert settings() == (True, True)
        assert settings() == (False, False)
    assert settings() == before
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(("clip", "passes"), [(FLAT, 1), (GHOST, 2)], ids=["flat", "ghost"])
def test_the_backward_pass_is_float32_whatever_the_user_set(clip: ClipConfig, passes: int) -> None:
    trainer = trainer_of(ToyTask(), clip, OptimConfig(), batch_size=5, steps=1, device=CUDA)
    seen, private = [], trainer.private

    def losses_of(rows: Sequence[int]) -> torch.Tensor:
        made: torch.Tensor = trainer.task.losses_of(rows)
        made.register_hook(lambda _: seen.extend(each.fp32_precision for each in (cuda.matmul, cudnn.conv)))
        return made

    with with_tf32(True):
        private.clip(losses_of, range(3))
        assert settings() == (True, True)
    assert seen == ["ieee"] * 2 * passes


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("newer", ["ieee", "tf32"])
def test_torchs_older_and_newer_settings_may_disagree(older: bool, newer: str) -> None:
    places = cuda.matmul, cudnn.conv, cudnn.rnn
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = older
    for place in places:
        place.fp32_precision = newer
    with full_float32():
        assert settings() == (False, False)  # torch raises an error where they disagree
        assert all(place.fp32_precision == "ieee" for place in places)
    assert all(place.fp32_precision == newer for place in places)
    with with_tf32(True):
        assert settings() == (True, True)
    cuda.matmul.fp32_precision = "tf32" if older else "ieee"
    assert cuda.matmul.allow_tf32 is older


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(UserError, match=r"train\.precision=tf32 needs an NVIDIA GPU, but this run is on cpu"):
        autocast("tf32", torch.device("cpu"))


def test_deterministic_is_for_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with arithmetic(CUDA, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
