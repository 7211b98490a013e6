"""The cost model: which way a layer goes, why, and that every way gives the same sums."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.clipping import Rates, WSConv2d, attach, explain, flat, per_layer
from groupwise.clipping import cost_model as costs
from groupwise.clipping.cost_model import measure_rates
from groupwise.clipping.reference import clipped_sums
from groupwise.clipping.rules import conv
from groupwise.errors import UserError
from tests.clipping.traced import clip, clip_batch

EVEN = Rates(matmul=1e10, gram=1e10, outer=1e10, kernel=1e10, bytes=1e10, calls=1e6)


def chosen(model: nn.Module, x: torch.Tensor, **options) -> list[str]:
    """The way each layer goes, in order, "one" where there is no choice."""
    with attach(model, per_layer(model), 0.1, **options) as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).square().sum(1), x)
        every = [member.context.choices for group in engine.groups for member in group.members]
        return [choices[choices.last].chosen if choices.last else "one" for choices in every]


@pytest.mark.parametrize(("length", "way"), [(4, "gram"), (500, "materialize"), (1, "one")])
def test_short_sequences_go_by_inner_products_and_long_ones_by_gradients(length, way):
    assert chosen(nn.Linear(64, 64), torch.randn(2, length, 64), rates=EVEN) == [way]


def test_bytes_count_as_much_as_operations():
    sizes = (nn.Linear(300, 300), torch.randn(2, 100, 300))  # where gradients win by operations alone
    assert chosen(*sizes, rates=dataclasses.replace(EVEN, bytes=1e13)) == ["materialize"]
    assert chosen(*sizes, rates=dataclasses.replace(EVEN, bytes=1e8)) == ["gram"]


@pytest.mark.parametrize("formula", ["gram", "materialize"])
def test_a_forced_formula_holds_whatever_it_costs(formula):
    for x in (torch.randn(2, 4, 64), torch.randn(2, 500, 64)):
        assert chosen(nn.Linear(64, 64), x, formula=formula, rates=EVEN) == [formula]


def test_an_unknown_formula_is_refused():
    with pytest.raises(UserError, match="formula='fast' is unknown"):
        attach(nn.Linear(2, 2), flat(nn.Linear(2, 2)), 1.0, formula="fast")


WAYS = {
    "gram": {"formula": "gram"},
    "unfold": {"formula": "materialize", "rates": dataclasses.replace(EVEN, kernel=1.0)},
    "kernel": {"formula": "materialize", "rates": dataclasses.replace(EVEN, outer=1.0)},
}
CONVOLUTIONS = {
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1, bias=False),
    "strided": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=(1, 0)),
    "dilated": lambda: nn.Conv2d(3, 4, (3, 2), dilation=2, padding=2),
    "wide": lambda: nn.Conv2d(8, 4, 3, padding=1),  # inner products over pixels are cheaper here
    "one_position": lambda: nn.Conv2d(3, 4, 1),
    "conv1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 5, stride=3, padding=2)),
    "conv3d": lambda: nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv3d(1, 2, 2, padding=1)),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "ws": lambda: WSConv2d(3, 4, 3, padding=1),
    "ws_gain": lambda: WSConv2d(3, 4, 3, padding=1, stride=2, gain=True),
}


@pytest.mark.parametrize("make_partition", [per_layer, flat])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_every_way_of_a_convolution_is_exact(layer, way, make_partition, double, monkeypatch):
    monkeypatch.setattr(conv, "LEAST_KERNEL_INPUT", 0)
    model = CONVOLUTIONS[layer]()
    channels = next(m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)).in_channels
    x = torch.randn(5, 3 if channels == 1 else channels, 6, 5)

    def losses(examples) -> torch.Tensor:
        return model(x[examples]).flatten(1).square().sum(1)

    partition = make_partition(model)
    norms = clipped_sums(model, lambda i: losses([i])[0], range(5), partition, [1.0]).norms
    threshold = float(norms.median())
    truth = clipped_sums(model, lambda i: losses([i])[0], range(5), partition, [threshold])
    with attach(model, partition, threshold, **WAYS[way]) as engine:
        clip(engine, losses, range(5))
        torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-7, atol=0)
        choices = engine.groups[0].members[0].context.choices
        decision = choices[choices.last]
        expected = {"gram": "gram", "unfold": "materialize", "kernel": "materialize/kernel"}[way]
        if expected in decision.work:
            assert decision.chosen == expected
        else:
            assert (layer, way) in {("grouped", "gram"), ("grouped", "kernel"), ("one_position", "kernel")}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.sums[name], rtol=1e-9, atol=1e-12)


def test_inner_products_never_understate_a_standardised_gradient_in_float32():
    """Inputs almost constant over a window: the gradient is all mean, which standardisation removes."""
    torch.manual_seed(0)
    layer = WSConv2d(3, 4, 3, gain=True)
    x = 100 + 0.01 * torch.randn(8, 3, 6, 6)
    direction = torch.randn(4, 4, 4)
    exact = WSConv2d(3, 4, 3, gain=True).double()
    exact.load_state_dict(layer.state_dict())
    truth = clipped_sums(
        exact, lambda i: (exact(x[[i]].double()) * direction.double()).sum(), range(8), per_layer(exact), [1.0]
    )
    for formula in ("gram", "materialize"):
        with attach(layer, per_layer(layer), 1.0, formula=formula) as engine:
            clip_batch(engine, lambda x: (layer(x) * direction).flatten(1).sum(1), x)
            assert bool((engine.per_example_norms[0] >= truth.norms[0] * (1 - 1e-6)).all())


def test_an_output_changed_in_place_is_refused_in_words():
    model = nn.Sequential(WSConv2d(3, 40, 3, bias=False), nn.ReLU(inplace=True))
    with (
        attach(model, per_layer(model), 1.0, formula="gram") as engine,
        pytest.raises(UserError, match="changed in place"),
    ):
        clip_batch(engine, lambda x: model(x).flatten(1).sum(1), torch.randn(2, 3, 5, 5))


def test_layers_with_the_same_input_share_its_inner_products():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).tanh()
            return self.query(x) * self.key(x) + self.value(x)

    model, x = Heads(), torch.randn(3, 4, 8)
    with attach(model, per_layer(model), 1.0, formula="gram") as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).sum(1), x)
        assert engine.products_reused == 2
        x.add_(1)  # in place: what was kept is of another input now
        clip_batch(engine, lambda x: model(x).flatten(1).sum(1), x)
        assert engine.products_reused == 4


def test_rates_are_measured_once_a_machine(own_cache, monkeypatch):
    measured = []
    monkeypatch.setattr(costs, "measure_rates", lambda device: measured.append(device) or EVEN)
    costs.machine_rates.cache_clear()
    assert costs.machine_rates("cpu", 0, 1) == EVEN
    costs.machine_rates.cache_clear()
    assert costs.machine_rates("cpu", 0, 1) == EVEN
    assert len(measured) == 1
    (file,) = own_cache.rglob("*.json")
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"value": {"matmul": 1.0}}))
    costs.machine_rates.cache_clear()
    assert costs.machine_rates("cpu", 0, 1) == EVEN
    assert len(measured) == 2, "a broken entry is measured again"
    costs.machine_rates.cache_clear()


def test_without_a_cache_choices_do_not_depend_on_a_measurement(own_cache, monkeypatch):
    own_cache.write_text("in the way")
    monkeypatch.setattr(costs, "measure_rates", lambda device: EVEN)
    costs.machine_rates.cache_clear()
    assert costs.machine_rates("cpu", 0, 1) == costs.USUAL_RATES["cpu"]
    costs.machine_rates.cache_clear()


def test_measured_rates_are_rates(monkeypatch):
    seconds = costs._seconds  # how often is another test's
    monkeypatch.setattr(costs, "_seconds", lambda run, device, many=1: seconds(run, device, many))
    assert all(1e3 < rate < 1e16 for rate in dataclasses.astuple(measure_rates(torch.device("cpu"))))


def test_explain_names_each_layer_its_way_and_the_price_of_the_others():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with attach(model, per_layer(model), 1.0, rates=EVEN) as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).sum(1), torch.randn(3, 5, 4))
        lines = explain(engine).splitlines()
    assert lines[1].split()[:5] == ["0", "Linear", "3×5×4", "->", "3×5×4"]
    assert "gram" in lines[1] and "materialize" in lines[1] and "ms and" in lines[1]
    assert lines[2].split()[:4] == ["1", "LayerNorm", "one", "way"]


def test_explain_is_a_table_with_the_way_that_was_taken_first():
    """On even rates, and with a layer that is the model itself."""
    model = nn.Linear(4, 4)
    for formula, forced in (("auto", ""), ("materialize", " (forced)")):
        with attach(model, per_layer(model), 1.0, rates=EVEN, formula=formula) as engine:
            clip_batch(engine, lambda x: model(x).flatten(1).sum(1), torch.randn(3, 5, 4))
            (decision,) = engine.groups[0].members[0].context.choices.values()
            lines = explain(engine).splitlines()
        other = next(name for name in decision.work if name != decision.chosen)
        costs_of = [
            f"{name} {1e3 * decision.seconds[name]:.2f} ms and {decision.work[name].bytes / 1e6:.1f} MB"
            for name in (decision.chosen, other)
        ]
        head = ("layer", "type", "input -> output", "norms by")
        row = ("(model)", "Linear", "3×5×4 -> 3×5×4", decision.chosen)
        widths = tuple(max(len(a), len(b)) for a, b in zip(head, row, strict=True))
        for line, cells, end in (
            (lines[0], head, "estimated, for norms and clipped sum"),
            (lines[1], row, ", ".join(costs_of) + forced),
        ):
            assert line == "  ".join([*(c.ljust(w) for c, w in zip(cells, widths, strict=True)), end])
        assert lines[2:] == ["Inner products of inputs taken over from the layer before: 0 times."]


def test_explain_says_where_there_is_no_choice_and_what_was_shared():
    model = nn.Sequential(nn.LayerNorm(4))
    with attach(model, per_layer(model), 1.0, rates=EVEN) as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).sum(1), torch.randn(3, 5, 4))
        engine._context.products.reused = 7
        lines = explain(engine).splitlines()
    assert lines[1] == f"0      LayerNorm  {'':15}  one way   no choice to make"
    assert lines[2].endswith("before: 7 times.")


class NoQuestions(TorchDispatchMode):
    """Fails when a value is asked for, which on a GPU makes the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"}, (
            func
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make_partition", "norms"), [(flat, "bookkeeping"), (flat, "ghost"), (per_layer, "bookkeeping")]
)
def test_backward_asks_a_gpu_nothing(make_partition, norms, monkeypatch):
    monkeypatch.setattr("groupwise.clipping.factors.is_async_device", lambda t: True)
    model = nn.Sequential(
        nn.Embedding(7, 6, padding_idx=0), nn.LayerNorm(6), nn.Unflatten(2, (6, 1)), nn.Flatten(2), nn.Linear(6, 6),
        nn.Unflatten(1, (2, 2)), nn.Flatten(2), nn.Unflatten(2, (3, 4)), WSConv2d(2, 4, 3, padding=1, gain=True),
        nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(24, 2),
    )  # fmt: skip
    with attach(model, make_partition(model), 0.1, norms=norms) as engine:
        ids = torch.randint(0, 7, (3, 4))
        clip_batch(engine, lambda ids: model(ids).square().sum(1), ids)  # rates are measured, paths are checked
        with NoQuestions():
            with engine.forward(3):
                losses = model(ids).square().sum(1)
            engine.backward(losses)
