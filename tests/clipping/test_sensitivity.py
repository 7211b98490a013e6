"""`engine.sensitivity` bounds how much one example changes the sums, and noise can be scaled by nothing else."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from groupwise.clipping import ClippingEngine, attach, automatic_factors, flat, per_layer
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource, noise_stds, release_gradients
from groupwise.privacy.thresholds import centred_counts
from tests.clipping.traced import clip_batch, trace_batch

SETTINGS = {"noise_multiplier": 1.5, "expected_batch_size": 4.0, "noise": NoiseSource.from_seed(0), "step": 0}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def backward(engine: ClippingEngine, x: torch.Tensor) -> None:
    clip_batch(engine, lambda x: engine.model(x).square().sum(1), x)


def sums(engine: ClippingEngine, x: torch.Tensor, microbatch: int) -> list[torch.Tensor]:
    """Clipped sums of a batch, one vector per group, and the centred counts."""
    engine.model.zero_grad()
    engine.reset()
    for start in range(0, len(x), microbatch):
        backward(engine, x[start : start + microbatch])
    clipped = [torch.cat([p.grad.flatten() for p in group.parameters]) for group in engine.groups]
    return [*clipped, centred_counts(engine.counts, len(x))]


@pytest.mark.parametrize("clip_rule", [None, automatic_factors(0.01)])
@pytest.mark.parametrize(
    ("make_partition", "thresholds", "norms"),
    [(flat, [0.7], "bookkeeping"), (flat, [0.7], "ghost"), (per_layer, [0.3, 2.0], "bookkeeping")],
)
def test_no_example_changes_a_group_by_more_than_its_threshold(double, make_partition, thresholds, norms, clip_rule):
    model, x = make_model(), 5 * torch.randn(6, 4)
    options = {} if clip_rule is None else {"clip_rule": clip_rule}
    with attach(model, make_partition(model), thresholds, norms=norms, **options) as engine:
        total = sums(engine, x, 4)
        bound = engine.sensitivity("add_remove")
        largest = torch.zeros(len(thresholds) + 1)
        for out in range(6):
            others = sums(engine, x[[i for i in range(6) if i != out]], 4)
            largest = torch.maximum(largest, torch.stack([(a - b).norm() for a, b in zip(total, others, strict=True)]))
    assert bound.relation == "add_remove" and bound.thresholds.tolist() == thresholds
    *largest, counted = largest.tolist()
    for moved, threshold in zip(largest, thresholds, strict=True):
        assert 0.9 * threshold < moved <= threshold * (1 + 1e-9)
    assert counted == pytest.approx(0.5 * len(thresholds) ** 0.5)
    assert [p for group in bound.groups for p in group] == list(model.parameters())


def test_sensitivity_has_the_thresholds_of_the_counted_passes():
    model = make_model()
    with attach(model, per_layer(model), [0.1, 5.0]) as engine:
        assert engine.sensitivity("add_remove").thresholds.tolist() == [0.1, 5.0], "current thresholds"
        backward(engine, torch.randn(3, 4))
        engine.set_thresholds([0.2, 0.5])
        assert engine.sensitivity("add_remove").thresholds.tolist() == [0.1, 5.0]
        backward(engine, torch.randn(3, 4))
        assert engine.sensitivity("add_remove").thresholds.tolist() == [0.2, 5.0], "the maximum of both"
        engine.reset()
        assert engine.sensitivity("add_remove").thresholds.tolist() == [0.2, 0.5]
        with engine.uncounted():
            backward(engine, torch.randn(3, 4))
        engine.set_thresholds([0.3, 0.4])
        assert engine.sensitivity("add_remove").thresholds.tolist() == [0.3, 0.4], "an uncounted pass does not count"


def test_thresholds_are_not_rounded_to_float32():
    """Tensors of the engine can be float32, but noise is scaled by the threshold as given."""
    model = make_model()
    with attach(model, flat(model), 0.1) as engine:
        backward(engine, torch.randn(3, 4))
        assert engine.sensitivity("add_remove").thresholds.tolist() == [0.1] != engine.thresholds.double().tolist()
        sizes = [sum(p.numel() for p in model.parameters())]
        stds = release_gradients(engine.sensitivity("add_remove"), allocation="global", **SETTINGS)
    assert torch.equal(stds, noise_stds([0.1], sizes, 1.5, "global"))


def test_thresholds_of_a_pipelines_two_passes_are_included():
    model, x = make_model(), torch.randn(3, 4)
    with attach(model, flat(model), 0.25) as engine:
        trace_batch(engine, lambda x: model(x).square().sum(1), x)
        for begin in (engine.norms_of, engine.sums_of):
            with engine.forward(3, microbatch="m"):
                losses = model(x).square().sum(1)
            with begin("m"):
                losses.sum().backward()
            engine.set_thresholds(0.125)
        assert engine.sensitivity("add_remove").thresholds.tolist() == [0.25]


@pytest.mark.parametrize("relation", ["replace_one", "", "add-remove"])
def test_an_unknown_relation_is_refused(relation):
    model = make_model()
    with attach(model, flat(model), 1.0) as engine, pytest.raises(UserError, match=f"relation='{relation}' is unknown"):
        engine.sensitivity(relation)


def test_noise_refuses_anything_but_a_sensitivity():
    model = make_model()
    with attach(model, flat(model), 1.0) as engine:
        backward(engine, torch.randn(3, 4))
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(TypeError):
            release_gradients([list(model.parameters())], [0.5], allocation="global", **SETTINGS)
        for other in ([list(model.parameters())], [0.5], 0.5, engine):
            with pytest.raises(AttributeError):
                release_gradients(other, allocation="global", **SETTINGS)
        bound = engine.sensitivity("add_remove")
        with pytest.raises(FrozenInstanceError):
            bound.thresholds = torch.tensor([0.5])
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))


def test_noise_refuses_a_relation_without_accounting():
    class Replaced:
        relation, groups, thresholds = "replace_one", [[nn.Parameter(torch.zeros(2))]], torch.ones(1)

    with pytest.raises(UserError, match="'replace_one'"):
        release_gradients(Replaced(), allocation="global", **SETTINGS)
