"""Parameters that modules use outside of layers: clipped exactly for any operation, or refused."""

from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat
from groupwise.clipping.calls import ParameterUse
from groupwise.errors import UserError
from tests.clipping import alone
from tests.clipping.alone import looped, middle_thresholds
from tests.clipping.covering import covering_pairs
from tests.clipping.modes import FEW, MODES, attached
from tests.clipping.traced import clip

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:groupwise has no rule")]

BATCHES = {1: [5], 2: [0, 5], 3: [0, 2, 5], 5: [0, 1, 2, 4, 5], 6: [0, 1, 2, 3, 4, 5]}
"""Batch size -> some of six examples; every axis of an input (B, 3, 5) is as long as some batch."""


class Uses(nn.Module):
    """A layer and a parameter `p`, and a function of both and the input."""

    def __init__(self, shape, use):
        super().__init__()
        self.p, self.layer, self.use = nn.Parameter(torch.rand(shape) + 0.5), nn.Linear(5, 5), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.p, self.layer, x)


def losses_of(model: nn.Module, x: Tensor, examples) -> Tensor:
    out = model(x[examples]).flatten(1)
    return (out * torch.arange(1.0, 1 + out.shape[1]).sin()).sum(1) * (torch.tensor(examples) + 1.0)


def of_rows(model, x):
    """Indices of rows -> their losses; the function of the output differs between examples."""
    return lambda rows: losses_of(model, x, list(rows))


def loop_over(model, x):
    return looped(model, lambda i: losses_of(model, x, [i])[0], range(len(x)))


def assert_exact(model, x, mode, loop=None, examples=None):
    """Assert exactness for all examples or some, at `middle_thresholds` of all of them."""
    partition, everything = MODES[mode][0](model), list(range(len(x)))
    loop = loop_over(model, x) if loop is None else loop
    thresholds = middle_thresholds(model, loop, partition, everything)
    with attached(model, mode, thresholds) as engine:
        alone.assert_exact(engine, of_rows(model, x), examples or everything, thresholds, loop)


def set_item(p, layer, x):
    y = x.clone()
    y[:, 0] = p
    return layer(y)


def in_place(p, layer, x):
    y = layer(x).mul_(p)
    y += p
    return y.relu_()


EXACT = {
    "times": ((5,), lambda p, layer, x: layer(x) * p),
    "no axis": ((), lambda p, layer, x: p.exp() * layer(x) + p),
    "linear, scaled, added": ((5, 5), lambda p, layer, x: F.linear(layer(x) * p[0], p) + p.sum()),
    "a layer's own weight": ((5,), lambda p, layer, x: F.linear(layer(x) * layer.weight.diag(), layer.weight) * p),
    "overlapping slices": ((8, 5), lambda p, layer, x: F.linear(layer(x), p[0:5]) + F.linear(x, p[2:7])),
    "cat": ((1, 2, 5), lambda p, layer, x: layer(torch.cat([p.expand(len(x), -1, -1), x], 1))),
    "stack": ((5,), lambda p, layer, x: layer(torch.stack([x, p.expand_as(x)], 1))),
    "where": ((5,), lambda p, layer, x: layer(torch.where((x > 0).any(-1, keepdim=True), p, x))),
    "set item": ((5,), set_item),
    "in place": ((5,), in_place),
    "index by data": ((2, 5), lambda p, layer, x: layer(x) + p[(x[..., 0] > 0).long()]),
    "einsum": ((3, 4), lambda p, layer, x: layer(torch.einsum("btd,te->bed", x, p))),
    "matmul from the left": ((4, 3), lambda p, layer, x: p @ layer(x)),
    "bmm": ((5, 4), lambda p, layer, x: torch.bmm(layer(x), p.expand(len(x), 5, 4))),
    "bmm, another axis first": ((3, 5, 4), lambda p, layer, x: torch.bmm(layer(x).transpose(0, 1), p).transpose(0, 1)),
    "masked fill": ((), lambda p, layer, x: layer(x.masked_fill(x > 0.5, p))),
    "repeat": ((5,), lambda p, layer, x: layer(x) + p.repeat(len(x), 3, 1)),
    "repeated, then viewed as one row": (
        (3, 5),
        lambda p, layer, x: layer(x) + p.repeat(len(x), 1, 1).view(len(x), 1, 15)[..., :5],
    ),
    "transposed, repeated, then rows of the batch": (
        (5, 3),
        lambda p, layer, x: layer(x) + p.T.unsqueeze(0).repeat(len(x), 1, 1).view(len(x) * 3, 5).view(len(x), 3, 5),
    ),
    "repeated, then sliced": ((1, 5), lambda p, layer, x: layer(x) + p.repeat([2 * 3, 1])[:3]),
    "repeated, then sliced across copies": ((3, 5), lambda p, layer, x: layer(x) + p.repeat(2, 1)[1:4]),
    "positions": ((3, 5), lambda p, layer, x: layer(x + p)),
    "times three": ((5,), lambda p, layer, x: layer(x) * (3 * p)),
    "among zeros": ((5,), lambda p, layer, x: layer(x) * torch.zeros(2, 5).index_put((torch.tensor([0]),), p).sum(0)),
    "rounded, straight through": ((5, 4), lambda p, layer, x: layer(x) @ (p + (p.round() - p).detach())),
    "a mask of small weights": ((5, 4), lambda p, layer, x: layer(x) @ (p * (p.abs() > 0.9))),
    "a triangle": ((5, 5), lambda p, layer, x: layer(x) @ (p * torch.ones(5, 5).tril())),
    "convolution": ((4, 3, 3), lambda p, layer, x: F.conv1d(layer(x), p, padding=1)),
    "folded rows": ((5,), lambda p, layer, x: (layer(x.flatten(0, 1)) * p).unflatten(0, (-1, 3))),
    "attention": ((3, 3), lambda p, layer, x: ((layer(x) @ x.mT) + p).softmax(-1) @ x),
}


PRODUCTS = {
    "from the right": ((5, 4), lambda p, layer, x: layer(x) @ p),
    "from the left": ((4, 3), lambda p, layer, x: torch.matmul(p, layer(x))),
    "mm": ((5, 4), lambda p, layer, x: torch.mm(layer(x[:, 0]), p)),
    "transposed": ((4, 5), lambda p, layer, x: layer(x) @ p.T),
    "transposed twice": ((5, 4), lambda p, layer, x: layer(x) @ p.t().transpose(-1, 0)),
    "linear, transposed": ((5, 4), lambda p, layer, x: F.linear(layer(x), p.mT)),
    "tied": ((4, 5), lambda p, layer, x: F.linear(F.linear(layer(x), p).relu(), p.t())),
    "one output": ((1, 5), lambda p, layer, x: F.linear(layer(x), p)),
    "of the input": ((4, 3), lambda p, layer, x: layer(p @ x)),
}
BIASED = {
    "a bias that is computed": lambda p, layer, x: F.linear(layer(x), p, torch.cat([p[0, :2], p.new_zeros(2)])),
    "a bias of a frozen weight": lambda p, layer, x: F.linear(layer(x), torch.ones(4, 5), p[:, 0]),
    "rows of weight and bias": lambda p, layer, x: F.linear(layer(x), p[:2], layer.bias[1:3]),
    "chunks": lambda p, layer, x: torch.cat([F.linear(layer(x), w) for w in p.chunk(3)], 2),
}
EXACT |= {name: ((4, 5), use) for name, use in BIASED.items()}
EXACT |= PRODUCTS | {
    "transpose of equal axes": ((5, 4), lambda p, layer, x: layer(x) @ p.transpose(0, -2)),
    "addmm, folded rows": (
        (5, 5),
        lambda p, layer, x: torch.addmm(layer.bias, layer(x).flatten(0, 1), p).unflatten(0, (-1, 3)),
    ),
    "transpose by names": ((4, 5), lambda p, layer, x: layer(x) @ p.transpose(dim0=0, dim1=1)),
    "transpose of a keyword": ((4, 5), lambda p, layer, x: layer(x) @ torch.t(input=p)),
    "a transpose by itself": ((4, 5), lambda p, layer, x: layer(x) @ p.T.sin()),
    "addmm": ((5, 5), lambda p, layer, x: torch.addmm(layer.bias, layer(x[:, 0]), p)),
    "addmm, scaled": ((5, 5), lambda p, layer, x: torch.addmm(layer.bias, layer(x[:, 0]), p, alpha=2)),
    "addmm, rows": ((5, 5), lambda p, layer, x: torch.addmm(x[:, 1], layer(x[:, 0]), p)),
    "addmm, scalar bias": ((1,), lambda p, layer, x: torch.addmm(p, layer(x[:, 0]), layer.weight)),
    "twice, and in part": ((5, 5), lambda p, layer, x: layer(x @ p) @ p.T + p[0]),
    "of itself": ((5, 5), lambda p, layer, x: layer(x) @ (p @ p.T)),
    "one vector": ((5,), lambda p, layer, x: layer(x) @ p),
    "cdist to rows": ((6, 5), lambda p, layer, x: torch.cdist(layer(x[:, 0]), p)),
    "einsum with rows": ((3, 5), lambda p, layer, x: torch.einsum("kd,bd->bk", p, layer(x[:, 0]))),
    "cosine_similarity to rows": ((6, 5), lambda p, layer, x: F.cosine_similarity(layer(x), p[:1], dim=-1)),
    "bilinear": ((4, 5, 5), lambda p, layer, x: F.bilinear(layer(x), x, p)),
    "without a batching rule": ((4, 5), lambda p, layer, x: F.linear(layer(x), torch._weight_norm(p, p[:, :1], 0))),
}

EXPANDED = {
    "stack": lambda q, h: torch.stack([q, h], 1).mean(1),
    "stack, examples second": lambda q, h: torch.stack([q, h]).sin().sum(0),
    "hstack": lambda q, h: torch.hstack([q, h]),
    "expand_as": lambda q, h: torch.stack([q[:, 0].expand_as(h[:, 0]), h[:, 0]], 1),
    "type_as, view_as": lambda q, h: h * q.type_as(h).contiguous().view_as(h),
    "einsum": lambda q, h: torch.einsum("bqd,bkd->bqk", q, h),
    "cosine_similarity": lambda q, h: F.cosine_similarity(q[:, None], h[:, :, None], dim=-1),
    "cdist": lambda q, h: torch.cdist(h, q),
    "cross": lambda q, h: torch.linalg.cross(h, q, dim=1),
    "gather": lambda q, h: h * q.gather(2, (h > 0).long()),
    "gather by names": lambda q, h: h * torch.gather(input=q, dim=2, index=(h > 0).long()),
    "take_along_dim": lambda q, h: h * torch.take_along_dim(q, (h > 0).long(), 1),
    "grid_sample": lambda q, h: F.grid_sample(q[:, None], h[:, :, None, :2].tanh(), align_corners=False),
    "scatter": lambda q, h: h.scatter(1, (h[:, :2] > 0).long() * 0, q[:, :1].expand(-1, 2, -1)),
    "scatter_add": lambda q, h: h.scatter_add(1, (h > 0).long(), q),
    "scatter into": lambda q, h: q.scatter_add(1, (h > 0).long(), h),
    "index_add": lambda q, h: h.index_add(1, torch.tensor([2, 0, 1]), q),
    "index_copy": lambda q, h: h.index_copy(1, torch.tensor([2, 0]), q[:, :2]),
    "slice_scatter": lambda q, h: torch.slice_scatter(h, q[:, :2], 1, 0, 2),
    "select_scatter": lambda q, h: h.select_scatter(q[:, 0], 1, 2),
    "in place": lambda q, h: q.clone().add_(h),
}
EXACT |= {
    f"expanded, {name}": ((3, 5), lambda p, layer, x, use=use: use(p.expand(len(x), 3, 5), layer(x)))
    for name, use in EXPANDED.items()
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products_do_not_copy_the_parameter_per_example(monkeypatch, name):
    monkeypatch.setattr(ParameterUse, "copies", None)
    shape, use = PRODUCTS[name]
    assert_exact(Uses(shape, use), torch.randn(7, 3, 5), "flat")  # 7: only the first axis is as long as the batch


def test_per_example_copies_of_large_weights_give_a_warning():
    model = Uses((5,), lambda p, layer, x: layer(x)[..., :5] * p + layer.weight[x[..., 0].long().abs() % 5])
    model.layer = nn.Linear(5, 1000)
    with attach(model, flat(model), 1.0) as engine, pytest.warns(UserWarning, match=r"weight of Linear"):
        clip(engine, of_rows(model, torch.randn(7, 3, 5)), range(7))


@cache
def use_of(name):
    """A model of that use, six examples and the loop over them, cached for all modes and batches."""
    model, x = Uses(*EXACT[name]), torch.randn(6, 3, 5)
    return model, x, loop_over(model, x)


@pytest.mark.parametrize(("name", "mode", "batches"), covering_pairs(EXACT, FEW, list(BATCHES)))
def test_any_use_is_exact_for_any_batch_size(name, mode, batches):
    model, x, loop = use_of(name)
    for batch in batches:
        assert_exact(model, x, mode, loop, BATCHES[batch])


CELLS = {
    f"{kind.__name__}, {rows}": (kind, rows) for kind, rows in product([nn.GRUCell, nn.LSTMCell, nn.RNNCell], [1, 3])
}


@pytest.mark.parametrize(("cell", "mode", "batches"), covering_pairs(CELLS, FEW, list(BATCHES)))
def test_learned_states_of_cells_are_exact_with_several_rows_per_example(cell, mode, batches):
    kind, rows = CELLS[cell]

    def use(p, layer, x):
        state = p.expand(len(x), 3, 5).reshape(-1, 5)
        output = layer(x.reshape(-1, 5), (state, state.sin()) if kind is nn.LSTMCell else state)
        return (output[0] if kind is nn.LSTMCell else output).view(len(x), 3, 5)

    model, x = Uses((rows, 5), use), torch.randn(6, 3, 5)
    model.layer = kind(5, 5)
    loop = loop_over(model, x)
    for batch in batches:
        assert_exact(model, x, mode, loop, BATCHES[batch])


CONSTANT = torch.randn(3, 5, dtype=torch.float64)
"""A constant with as many rows as some batch has examples."""


EXACT_OR_REFUSED = {
    "batch last": ((5, 1), lambda p, layer, x: (layer(x).permute(1, 2, 0) * p).permute(2, 0, 1)),
    "batch last, axes reversed": ((3, 1), lambda p, layer, x: (layer(x).permute(2, 1, 0) * p).permute(2, 1, 0)),
    "sequences first": ((3, 5), lambda p, layer, x: layer(x.transpose(0, 1) + p.unsqueeze(1)).transpose(0, 1)),
    "sorted": ((5,), lambda p, layer, x: (layer(x)[x[:, 0, 0].argsort()] * p)[x[:, 0, 0].argsort().argsort()]),
    "reversed": ((5,), lambda p, layer, x: (layer(x).flip(0) * p).flip(0)),
    "product from the left of rows": ((4, 5), lambda p, layer, x: (p @ layer(x[:, 0]).T).T),
    "product, sequences first": ((5, 5), lambda p, layer, x: layer((x.transpose(0, 1) @ p).transpose(0, 1))),
    "a constant, multiplied too": ((5, 4), lambda p, layer, x: (layer(x[:, 0]) @ p) @ (CONSTANT @ p).T),
    "a constant, multiplied alone": ((5, 4), lambda p, layer, x: layer(x[:, 0]) * (CONSTANT @ p).sum()),
}


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("name", EXACT_OR_REFUSED)
def test_uses_with_ambiguous_shapes_are_exact_or_refused(name, mode):
    model, x = Uses(*EXACT_OR_REFUSED[name]), torch.randn(6, 3, 5)
    loop, refused = loop_over(model, x), 0
    for examples in BATCHES.values():
        try:
            assert_exact(model, x, mode, loop, examples)
        except UserError:
            refused += 1
    assert refused == (len(BATCHES) - 1 if name in ("sorted", "reversed") else 0)
