"""Precision of every rule: under autocast, and norms that are increased by a bound of their rounding error."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat, gram, norm_terms, per_layer
from groupwise.clipping import shared_parameters as joint
from groupwise.clipping.gram import OuterProducts as Outer
from groupwise.clipping.norm_methods import NormMethods
from groupwise.clipping.partition import find_layers
from groupwise.clipping.rules.conv import ConvRule
from groupwise.clipping.rules.embedding import EmbeddingRule
from tests.clipping.alone import assert_exact
from tests.clipping.conftest import BATCH, CASES, make_case
from tests.clipping.covering import covering_pairs
from tests.clipping.traced import clip_batch, trace_batch

WITHOUT_RULE = ("fallback", "parametrized", "reused_rms_norm", "conv_transpose", "reused_conv_transpose", "std_conv")
FALLBACKS = [name for name in CASES if name.startswith((*WITHOUT_RULE, "frozen_transposed"))]


@pytest.mark.parametrize("make_partition", [pytest.param(flat, marks=pytest.mark.slow), per_layer])
@pytest.mark.parametrize("name", [name for name in CASES if name not in {*FALLBACKS, "ws_conv_gain"}])
def test_autocast_gives_the_models_own_output_and_float32_sums(name, make_partition):
    torch.manual_seed(0)
    case = make_case(name)
    with torch.autocast("cpu", torch.bfloat16):
        plain = case.model(case.inputs)
    with attach(case.model, make_partition(case.model), 1e30) as engine:
        with torch.autocast("cpu", torch.bfloat16):
            trace_batch(engine, lambda x: case.model(x).float().flatten(1).sum(1), case.inputs)
            with engine.forward(BATCH):
                output = case.model(case.inputs)
        if "norm" not in name and "hf" not in name:  # norms give float32 as on a GPU; torch's CPU kernels do not
            assert output.dtype == plain.dtype
        torch.testing.assert_close(output.float(), plain.float(), rtol=0.05, atol=0.05)
        engine.backward(output.float().flatten(1).square().sum(1))
        assert all(squares.dtype == torch.float64 for squares in engine.squared_norms.values())
        sums = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.requires_grad}
    case.model.zero_grad()
    case.model(case.inputs).flatten(1).square().sum().backward()
    for name, total in sums.items():
        exact = case.model.get_parameter(name).grad
        assert total.dtype == torch.float32
        assert float((total - exact).norm()) <= 0.08 * float(exact.norm()) + 0.05, name


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
@pytest.mark.parametrize("mode", ["layer", pytest.param("flat", marks=pytest.mark.slow), "ghost"])
@pytest.mark.parametrize("name", CASES)
def test_a_backward_pass_inside_autocast_gives_the_same_gradients(name, mode):
    torch.manual_seed(0)
    case = make_case(name)
    norms = "ghost" if mode == "ghost" else "bookkeeping"
    sums = []
    for enabled in (False, True):
        case.model.zero_grad()
        with attach(case.model, (per_layer if mode == "layer" else flat)(case.model), 1.0, norms=norms) as engine:
            trace_batch(engine, lambda x: case.model(x).flatten(1).square().sum(1), case.inputs)
            with engine.forward(BATCH):
                losses = case.model(case.inputs).flatten(1).square().sum(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                engine.backward(losses)
        sums.append([p.grad for p in case.model.parameters() if p.requires_grad])
    for outside, inside in zip(*sums, strict=True):
        torch.testing.assert_close(inside, outside, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
@pytest.mark.parametrize("name", FALLBACKS)
def test_the_fallback_runs_in_float32_under_autocast(name):
    torch.manual_seed(0)
    case = make_case(name)
    expected = case.model(case.inputs)
    with attach(case.model, flat(case.model), 1.0) as engine, torch.autocast("cpu", torch.bfloat16):
        clip_batch(engine, lambda x: case.model(x).float().flatten(1).square().sum(1), case.inputs)
        if len(engine.groups[0].members) == 1:
            with engine.forward(BATCH):
                torch.testing.assert_close(case.model(case.inputs), expected, rtol=1e-5, atol=1e-5)
    assert all(p.grad.dtype == torch.float32 for p in case.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", [name for name in CASES if name not in FALLBACKS])
def test_every_layer_of_a_case_has_a_rule(name):
    assert all(layer.rule for layer in find_layers(make_case(name).model))


def test_per_example_gradients_of_an_embedding_are_exact():
    ids, g = torch.tensor([[1, 1, 0], [4, 2, 4]]), torch.randn(2, 3, 3)
    (rows,) = EmbeddingRule(nn.Embedding(5, 3)).per_example_gradients((ids,), g, (True,))
    torch.testing.assert_close(rows, torch.einsum("btv,btd->bvd", nn.functional.one_hot(ids, 5).float(), g))


@pytest.mark.parametrize(
    ("layer", "space", "longest"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), 6, 36),
        (nn.Conv2d(3, 4, 3, padding=1), 4, 27),
        (nn.Conv2d(3, 40, 3, padding=1), 4, 40),
    ],
)
def test_slack_of_a_convolution_uses_its_longest_sum(monkeypatch, layer, space, longest):
    recorded = []
    monkeypatch.setattr(norm_terms, "slack_of", lambda n, *_: recorded.append(n) or 0.0)
    rule = ConvRule(layer, NormMethods("gram"))
    y, saved = rule.forward(torch.randn(2, 3, space, space), layer.weight.detach(), layer.bias.detach())
    rule.squared_norms(saved, torch.randn_like(y), (True, False))
    assert set(recorded) == {longest}


@pytest.mark.parametrize("kinds", ["rows, rows", "indices, indices", "indices, rows", "rows, indices"])
def test_inner_products_of_two_uses_get_slack_for_rounding(double, kinds):
    """⟨Σ l rᵀ, Σ l' r'ᵀ⟩, with slack for terms of size Σ‖l‖‖r‖ · Σ‖l'‖‖r'‖ in sums of n terms."""
    sides, dense = [], []
    for kind, t in zip(kinds.split(", "), (3, 5), strict=True):
        indices = torch.randint(0, 7, (2, t))
        rows = torch.randn(2, t, 7) if kind == "rows" else nn.functional.one_hot(indices, 7).double()
        right = torch.randn(2, t, 4)
        sides.append(Outer(rows if kind == "rows" else indices, right))
        dense.append((rows, right))
    (left, right), (other_left, other_right) = dense
    exact = ((left.mT @ right) * (other_left.mT @ other_right)).sum((1, 2))
    sizes = [(rows.norm(dim=2) * r.norm(dim=2)).sum(1) for rows, r in dense]
    slack = 4 * 4**0.5 * torch.finfo(torch.float64).eps * sizes[0] * sizes[1]
    found = sides[0].inner(sides[1])
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
    original = gram.rounding_slack
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram, "rounding_slack", lambda size, n: recorded.append((size, n)) or 100 + original(size, n))
        torch.testing.assert_close(sides[0].inner(sides[1]), exact + 100 + slack, rtol=1e-9, atol=0)
    torch.testing.assert_close(recorded[0][0], sizes[0] * sizes[1])
    assert recorded[0][1] == 4
    long = Outer(torch.randn(2, 9, 7), torch.randn(2, 9, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram, "rounding_slack", lambda size, n: recorded.append((size, n)) or size)
        long.inner(long)
    assert recorded[-1][1] == 9


def test_three_uses_of_a_layer_are_exact_and_get_slack_if_materialised(double, monkeypatch):
    recorded, original = [], joint.rounding_slack

    def slack(sizes: Tensor, terms: int, dtype: torch.dtype | None = None) -> Tensor:
        recorded.append(terms)
        return original(sizes, terms, dtype) + 1.0

    for layer, x in ((nn.Linear(4, 4), torch.randn(3, 2, 4)), (nn.Conv1d(4, 4, 3, padding=1), torch.randn(3, 4, 5))):
        model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)
        exact = []
        for i in range(3):
            gradients = torch.autograd.grad(model(x[i : i + 1]).square().sum(), list(layer.parameters()))
            exact.append(sum(g.square().sum() for g in gradients).sqrt())
        for make_partition, norms in ((flat, "bookkeeping"), (flat, "ghost"), (per_layer, "bookkeeping")):
            with attach(model, make_partition(model), 1.0, norms=norms) as engine:
                clip_batch(engine, lambda x, run=model: run(x).flatten(1).square().sum(1), x)
                torch.testing.assert_close(engine.per_example_norms[0], torch.stack(exact), rtol=1e-9, atol=0)
        if isinstance(layer, nn.Linear):  # its uses are one sequence: no cross terms that could cancel
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joint, "rounding_slack", slack)
            with attach(model, per_layer(model), 1.0) as engine:
                clip_batch(engine, lambda x, run=model: run(x).flatten(1).square().sum(1), x)
                slack_added = engine.per_example_norms[0].square() - torch.stack(exact).square()
        assert bool((slack_added > 0.99).all()), "never lowered"
        assert layer.weight.numel() in recorded


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
def test_a_fallback_takes_nested_inputs_and_outputs(double):
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(3) + 0.5)

        def forward(self, pair: dict[str, Tensor], ids: Tensor, *, power: int = 1) -> dict[str, Tensor | list[Tensor]]:
            mixed = pair["a"] * self.scale**power + pair["b"] + ids.unsqueeze(1)
            return {"first": mixed, "rest": [mixed.square()]}

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.nested = nn.Linear(3, 3), Nested()

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            out = self.nested({"a": self.body(x), "b": x}, ids=ids, power=3)
            return out["first"] + out["rest"][0]

    model, x = Outside(), torch.randn(4, 3)
    with attach(model, per_layer(model), 1.0) as engine:
        assert_exact(engine, lambda rows: model(x[list(rows)], torch.tensor(list(rows))).sum(1), range(4))


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
@pytest.mark.parametrize(
    ("name", "formula", "sizes"), covering_pairs(CASES, ["gram", "materialize"], [1e17, 1e19, 3e19, 1e37])
)
def test_an_example_of_any_size_is_clipped_or_left_out(name, formula, sizes):
    """float32 ends at 3e38: intermediate results must not overflow if the norm itself does not."""
    torch.manual_seed(0)
    case = make_case(name)
    with attach(case.model, per_layer(case.model), 1.0, formula=formula) as engine:
        for big in sizes:
            case.model.zero_grad()
            engine.reset()
            factors = torch.tensor([big, *[1.0] * (BATCH - 1)])
            clip_batch(engine, lambda x, w: case.model(x).flatten(1).square().sum(1) * w, case.inputs, factors)
            for group in engine.groups:
                sums = [p.grad.double().flatten() for p in group.parameters]
                assert float(torch.cat(sums).norm()) <= BATCH * (1 + 1e-5), (group.name, big)
