"""torch's TF32 and determinism settings are as requested during a run, and are restored after it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.backends import cuda, cudnn

from groupwise import run
from groupwise.checkout import CONF
from groupwise.clipping.precision import full_float32, with_tf32
from groupwise.config.compose import compose_run
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.errors import UserError
from groupwise.training.from_config import autocast
from tests.tiny_training import FLAT, GHOST, trainer_of
from tests.training.test_step import ToyTask

CUDA = torch.device("cuda", 0)
"""Only named and never used: settings need no GPU."""
BACKENDS = cuda.matmul, cudnn.conv, cudnn.rnn


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(autouse=True)
def _tf32_off_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with with_tf32(False):
        yield


@pytest.mark.parametrize("before", [(False, True), (True, True), (False, False), (True, False)])
def test_full_float32_turns_tf32_off_and_restores_the_settings(before: tuple[bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    with full_float32():
        assert settings() == (False, False)
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        for _ in range(2):
            with autocast("tf32", CUDA)():
                assert settings() == (True, True)
                assert all(backend.fp32_precision == "tf32" for backend in BACKENDS)
                with full_float32():  # the backward pass
                    assert all(backend.fp32_precision == "ieee" for backend in BACKENDS)
            assert settings() == (False, False)
            assert all(backend.fp32_precision == "ieee" for backend in BACKENDS)
    assert settings() == before
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_a_run_is_in_full_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []
    monkeypatch.setattr(run, "_run", lambda *_: seen.extend(backend.fp32_precision for backend in BACKENDS) or {})
    config = compose_run(["task=cifar", "scale=smoke", "train.device=cpu", f"paths.results={tmp_path}"], CONF)
    with with_tf32(True):
        run.run(config)
        assert settings() == (True, True)
    assert seen == ["ieee"] * 3


@pytest.mark.parametrize(("clip", "passes"), [(FLAT, 1), (GHOST, 2)], ids=["flat", "ghost"])
def test_the_backward_pass_is_float32_for_every_setting_of_the_user(clip: ClipConfig, passes: int) -> None:
    trainer = trainer_of(ToyTask(), clip, OptimConfig(), batch_size=5, steps=1, device=CUDA)
    seen, private = [], trainer.private

    def losses_of(rows: Sequence[int]) -> torch.Tensor:
        losses: torch.Tensor = trainer.task.losses_of(rows)
        losses.register_hook(lambda _: seen.extend(each.fp32_precision for each in (cuda.matmul, cudnn.conv)))
        return losses

    with with_tf32(True):
        private.clip(losses_of, range(3))
        assert settings() == (True, True)
    assert seen == ["ieee"] * 2 * passes


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("newer", ["ieee", "tf32"])
def test_torchs_older_and_newer_settings_may_disagree(older: bool, newer: str) -> None:
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = older
    for backend in BACKENDS:
        backend.fp32_precision = newer
    with full_float32():
        assert settings() == (False, False)  # torch raises an error where they disagree
        assert all(backend.fp32_precision == "ieee" for backend in BACKENDS)
    assert all(backend.fp32_precision == newer for backend in BACKENDS)
    with with_tf32(True):
        assert settings() == (True, True)
    cuda.matmul.fp32_precision = "tf32" if older else "ieee"
    assert cuda.matmul.allow_tf32 is older


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"train\.precision=tf32 needs an NVIDIA GPU, but this run is on cpu"):
        autocast("tf32", torch.device("cpu"))


def test_deterministic_algorithms_are_turned_off_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with run._deterministic(CUDA):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with run._deterministic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
