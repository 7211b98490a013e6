"""The arithmetic of a GPU is what was asked for, and afterwards what it was; seen here in torch's own settings."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.backends import cuda, cudnn

from groupwise.clipping.precision import kept_precisions
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.errors import UserError
from groupwise.training.arithmetic import arithmetic, products
from groupwise.training.from_config import autocast
from tests.tiny_training import FLAT, GHOST, trainer_of
from tests.training.test_step import ToyTask

CUDA = torch.device("cuda", 0)
"""Named, never used: settings need no GPU."""


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(autouse=True)
def _as_torch_has_it() -> Iterator[None]:
    before = settings()
    with kept_precisions():
        yield
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


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

    with products(tf32=True):
        private.clip(losses_of, range(3))
        assert settings() == (True, True)
    assert seen == ["ieee"] * 2 * passes


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(UserError, match=r"train\.precision=tf32 needs an NVIDIA GPU, but this run is on cpu"):
        autocast("tf32", torch.device("cpu"))


def test_deterministic_is_for_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with arithmetic(CUDA, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
