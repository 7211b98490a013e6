"""All flat methods, ours and those of Opacus, give the same clipped sums."""

import math

import pytest
import torch

from benchmarks import methods
from benchmarks.job import Job
from benchmarks.methods import METHODS, RECORDED, THRESHOLD, make
from benchmarks.research_peers import package_of
from benchmarks.throughput import Options
from benchmarks.worker import Bench
from benchmarks.workloads import build
from groupwise.errors import UserError
from tests.tapes import Tape

# Opacus divides by norm + 1e-6, so its sums are up to 1e-6/norm too small.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-9}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def sums(workload_name: str, method_name: str, **options: object) -> dict[str, torch.Tensor]:
    """The gradients after one step of a method, by index of the parameter."""
    workload = build(workload_name, tiny=True, dtype="float64", **options)
    method = make(method_name, workload)
    method.step()
    return {str(place): p.grad.clone() for place, p in enumerate(workload.trainable)}


INSTALLED = [name for name in METHODS if not name.startswith("none") and package_of(name) is None]
FLAT = ("ghost", "opacus_hooks", "opacus_functorch", "opacus_ghost")
FLAT_PAIRS = [
    (workload, method)
    for workload in ("mlp", "wrn16_4_ws", "wrn16_4_conv", "gpt2", "gpt2_untied", "lora_gpt2")
    for method in FLAT
    if (workload, method) != ("gpt2", "opacus_ghost")  # refused: see below
]


@pytest.mark.parametrize(("workload", "method"), FLAT_PAIRS)
def test_flat_methods_give_the_same_sums(workload: str, method: str) -> None:
    ours = sums(workload, "flat")
    assert any(bool(value.any()) for value in ours.values())
    torch.testing.assert_close(sums(workload, method), ours, **TOLERANCE)


def test_opacus_per_layer_clips_each_parameter_to_its_share() -> None:
    theirs, plain = sums("mlp", "opacus_per_layer", batch=1), sums("mlp", "none", batch=1)
    bound = THRESHOLD / math.sqrt(len(plain))
    for name, gradient in plain.items():
        expected = gradient * min(1.0, bound / float(gradient.norm()))
        torch.testing.assert_close(theirs[name], expected, **TOLERANCE)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", RECORDED)
def test_cuda_graph_methods_match_eager_ones(name: str, monkeypatch) -> None:
    tape, found = Tape(), {}
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        make(name, build("mlp", tiny=True))
    monkeypatch.setattr(methods, "recorder_of", lambda device: tape)
    for which in (name, RECORDED[name]):
        workload = build("mlp", tiny=True)
        method = make(which, workload)
        for _ in range(2 if which == name else 5):  # warm-up and recording took three
            method.step()
        found[which] = torch.cat([p.grad.flatten() for p in workload.trainable])
    assert torch.equal(*found.values()) and tape.launches == 2
    assert Bench(Job("mlp", name, tiny=True)).measure()["peak_bytes"] is None and tape.launches == 6


@pytest.mark.parametrize("name", INSTALLED)
def test_noise_is_separate_and_cleared_by_the_next_step(name: str) -> None:
    workload = build("mlp", tiny=True)
    method = make(name, workload)
    method.step()
    before = torch.cat([p.grad.flatten() for p in workload.trainable])
    method.noise()
    noise = torch.cat([p.grad.flatten() for p in workload.trainable])
    noise = noise - before if name.startswith("opacus") else noise * workload.batch - before
    assert noise.std() == pytest.approx(THRESHOLD, rel=0.15)
    method.step()
    after = torch.cat([p.grad.flatten() for p in workload.trainable])
    assert float((after - before).norm()) < 0.5 * float(noise.norm())
    method.clear()
    assert all(p.grad is None for p in workload.trainable)


def test_research_peers_without_their_folder_are_left_out_or_raise() -> None:
    assert not [name for name in Options().methods if package_of(name)]
    with pytest.raises(UserError, match=r"private_transformers cannot be imported .*: give peers=FOLDER"):
        make("private_transformers", build("mlp", tiny=True))


def test_opacus_ghost_refuses_tied_weights() -> None:
    with pytest.raises(NotImplementedError, match="tying"):
        sums("gpt2", "opacus_ghost")


def test_opacus_gives_wrong_sums_for_channels_last_convolutions() -> None:
    """Opacus raises no error there, so `benchmarks.driver` compares the sums of both formats."""
    right, wrong = (sums("wrn16_4_conv", "opacus_hooks", channels_last=last) for last in (False, True))
    assert any(not torch.allclose(right[name], wrong[name], rtol=1e-3) for name in right)
    ours = sums("wrn16_4_conv", "flat", channels_last=True)
    torch.testing.assert_close(ours, right, **TOLERANCE)
