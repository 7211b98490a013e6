"""The arithmetic of a GPU is what was asked for, and afterwards what it was; seen here in torch's own settings."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, flat
from groupwise.clipping.precision import kept_precisions
from groupwise.errors import UserError
from groupwise.privacy import FixedThresholds, NoiseSource, make_plan
from groupwise.training.arithmetic import arithmetic, products
from groupwise.training.from_config import autocast
from groupwise.training.private_step import PrivateStep

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


def clipped() -> PrivateStep:
    model = nn.Linear(3, 2)
    engine = attach(model, flat(model), [1.0])
    engine.trace(lambda rows: model(torch.randn(6, 3)[list(rows)]).sum(1), range(6))
    return PrivateStep(
        model=model,
        engine=engine,
        thresholds=FixedThresholds([1.0]),
        plan=make_plan(dataset_size=10, expected_batch_size=5, steps=1, delta=1e-2, noise_multiplier=1.0),
        noise=NoiseSource.from_seed(0),
        allocation="global",
        optimizer=torch.optim.SGD(model.parameters()),
        device=CUDA,
        sums=None,  # type: ignore[arg-type]  # no step is taken
    )


def test_the_backward_pass_is_float32_whatever_the_user_set() -> None:
    seen, private = [], clipped()

    def losses_of(rows: Sequence[int]) -> torch.Tensor:
        made: torch.Tensor = private.model(torch.zeros(len(rows), 3)).sum(1)
        made.register_hook(lambda _: seen.append(torch.backends.cuda.matmul.fp32_precision))
        return made

    with products(tf32=True):
        private.clip(losses_of, range(3))
        assert settings() == (True, True)
    assert seen == ["ieee"]


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(UserError, match=r"train\.precision=tf32 is for NVIDIA's GPUs, and this run is on cpu"):
        autocast("tf32", torch.device("cpu"))


def test_deterministic_is_for_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with arithmetic(CUDA, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
