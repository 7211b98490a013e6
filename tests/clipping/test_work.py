"""The cost model's numbers are true: operations as torch counts them, bytes by hand, rates from the clock."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from groupwise.clipping import Rates, WSConv2d
from groupwise.clipping import cost_model as costs
from groupwise.clipping.cost_model import Choices, Work, measure_rates
from groupwise.clipping.rules import conv, find_rule, matrix
from groupwise.clipping.rules.base import BufferPool, RuleContext
from groupwise.clipping.rules.conv import Conv2dRule
from groupwise.clipping.rules.geometry import Geometry
from groupwise.clipping.rules.linear import LinearRule
from groupwise.clipping.rules.ws_conv import WSConv2dRule

EVEN = Rates(matmul=1e10, gram=1e10, outer=1e10, kernel=1e10, bytes=1e10, calls=1e6)
WAYS = {
    "gram": {"formula": "gram", "rates": EVEN},
    "materialize": {"formula": "materialize", "rates": dataclasses.replace(EVEN, kernel=1.0)},
    "materialize/kernel": {"formula": "materialize", "rates": dataclasses.replace(EVEN, outer=1.0)},
}


def _product(a, b) -> int:
    """Operations of a product; weighing rows by a vector is a matter of bytes, and counted there."""
    return 2 * a[0] * a[1] * b[1] if min(a[0], b[1]) > 1 else 0


COUNTED = {
    torch.ops.aten.mm: lambda a, b, *_, out_shape=None, **__: _product(a, b),
    torch.ops.aten.addmm: lambda c, a, b, *_, out_shape=None, **__: _product(a, b),
}


def operations(run) -> int:
    """What torch counts in products of matrices and convolutions while it runs."""
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        run()
    return counter.get_total_flops()


def promised(choices) -> int:
    decision = choices[choices.last]
    work = decision.work[decision.chosen]
    return int(work.matmul + work.gram + work.outer + work.kernel)


def norms_and_sum(rule, saved, g, wanted, context) -> None:
    factors = torch.full((len(g),), 0.5)
    if context.own_group:
        rule.clipped_sum(saved, g, lambda squares: factors[: len(squares)], wanted, context)
    else:
        rule.book_keep(saved, g, wanted, context)[1](factors)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("formula", ["gram", "materialize"])
@pytest.mark.parametrize(("d", "p"), [(5, 7), (20, 20), (30, 6)])
def test_a_linear_layer_does_the_operations_that_it_was_chosen_for(formula, alone, d, p):
    layer, x, g = nn.Linear(d, p), torch.randn(3, 4, d), torch.randn(3, 4, p)
    rule, context = LinearRule(layer), RuleContext(own_group=alone, choices=Choices(formula, EVEN))
    done = operations(lambda: norms_and_sum(rule, (x, layer.weight.detach()), g, (True, True), context))
    choices = context.choices
    assert choices[choices.last].chosen == formula
    assert done == promised(choices) > 0


LAYERS = {
    "plain": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 5)),
    "strided": (lambda: nn.Conv2d(3, 4, (3, 2), stride=2, padding=1, dilation=2), (2, 3, 9, 8)),
    "many filters": (lambda: nn.Conv2d(3, 40, 3, padding=1), (2, 3, 3, 3)),
    "dilated": (lambda: nn.Conv2d(6, 4, 3, padding=3, dilation=(3, 1)), (2, 6, 4, 5)),
    "many channels": (lambda: nn.Conv2d(64, 4, 3, padding=1), (2, 64, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, dilation=2), (2, 3, 5, 4)),
    "transposed, few places": (lambda: nn.ConvTranspose2d(8, 9, 3), (2, 8, 2, 2)),
    "one axis": (lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 9)),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_convolution_does_the_operations_that_it_was_chosen_for(monkeypatch, name, way, alone):
    monkeypatch.setattr(conv, "LEAST_KERNEL_INPUT", 0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    rule, context = find_rule(layer)(layer), RuleContext(own_group=alone, choices=Choices(**WAYS[way]))
    choices = context.choices
    y, saved = rule.forward(x, *(p.detach() for p in layer.parameters()))
    done = operations(lambda: norms_and_sum(rule, saved, torch.randn_like(y), (True, True), context))
    assert choices[choices.last].chosen == way
    assert done == promised(choices) > 0
    calls = choices[choices.last].work[way].calls
    assert calls == (2 if way.endswith("kernel") else 0)


@pytest.mark.parametrize(
    ("geometry", "channels", "space", "out", "expected"),
    [
        # t = 9, K = 27: unfolding 2·81·27 and 2·9·27 numbers; pixels 2·81·3 and 15·81 numbers
        (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), 3, (3, 3), (3, 3), (False, 4374.0, 486.0)),
        # t = 25, K = 576: unfolding 2·625·576; pixels 2·625·64 and (1 + 2·(1 + 2·3))·625 numbers
        (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), 64, (5, 5), (5, 5), (True, 80_000.0, 9_375.0)),
        (Geometry((2,), (3,), (0,), (1,), 1), 5, (11,), (4,), (False, 320.0, 80.0)),
    ],
)
def test_what_inner_products_between_positions_cost(geometry, channels, space, out, expected):
    assert geometry.products_work(channels, space, out) == expected
    x = torch.randn(1, channels, *space)
    assert operations(lambda: geometry.products(x, torch.Size(out), BufferPool())) == expected[1]


def test_the_bytes_of_a_linear_layer():
    """Scaling reads and writes the smaller side; T×T products are touched three times, gradients two or three times."""

    def ways(t, d, p, own_group):
        return LinearRule(nn.Linear(d, p)).ways(torch.Size((2, t, d)), torch.Size((2, t, p)), own_group)

    for alone, materialize in ((True, 3 * 4 * 2 * 35), (False, 2 * 4 * 2 * 35 + 8 * 2 * 2 * 5)):
        assert ways(2, 5, 7, alone)["gram"].bytes == 8 * 2 * 2 * 5 + 24 * 2 * 4
        assert ways(2, 5, 7, alone)["materialize"].bytes == materialize
    assert ways(3, 5, 7, False)["materialize"].bytes == 3 * 4 * 2 * 35, "kept gradients need no second product"
    assert ways(3, 7, 5, True)["gram"].bytes == 8 * 2 * 3 * 5 + 24 * 2 * 9


def test_the_bytes_of_a_convolution(monkeypatch):
    monkeypatch.setattr(conv, "LEAST_KERNEL_INPUT", 0)
    scaling, gradients, columns = 8 * 2 * 4 * 9, 4 * 2 * 4 * 27, 8 * 2 * 9 * 27
    for alone, later in ((True, 3 * gradients), (False, 2 * gradients + scaling)):
        rule = Conv2dRule(nn.Conv2d(3, 4, 3, padding=1))
        ways = rule.ways(torch.Size((2, 3, 3, 3)), torch.Size((2, 4, 3, 3)), alone)
        assert ways["materialize"].bytes == later + columns
        assert ways["materialize/kernel"].bytes == later + 3 * gradients
        assert ways["gram"].bytes == scaling + 4 * 2 * (486 + 6 * 81)
    kept = Conv2dRule(nn.Conv2d(3, 4, 3, padding=1)).ways(torch.Size((2, 3, 6, 5)), torch.Size((2, 4, 6, 5)), False)
    assert kept["materialize"] == Work(outer=2 * 2 * 4 * 30 * 27, bytes=3 * gradients + 8 * 2 * 30 * 27)
    wide = Conv2dRule(nn.Conv2d(8, 4, 3)).ways(torch.Size((2, 8, 6, 5)), torch.Size((2, 4, 4, 3)), True)
    products = 2 * 2 * 4 * 12 * 72
    assert wide["materialize"] == Work(
        outer=products, bytes=3 * 4 * 2 * 4 * 72 + 8 * 2 * 6 * 3 * 24, lost=0.6 * products
    )


def test_which_ways_a_convolution_has(monkeypatch):
    def names(layer, inputs=(2, 4, 6, 6), out=(2, 4, 4, 4)):
        return set(Conv2dRule(layer).ways(torch.Size(inputs), torch.Size(out), False))

    least = math.prod((4, 6, 6))
    for limit, kernels in ((least - 1, {"materialize/kernel"}), (least, set())):
        monkeypatch.setattr(conv, "LEAST_KERNEL_INPUT", limit)
        assert names(nn.Conv2d(4, 4, 3)) == {"gram", "materialize"} | kernels
    monkeypatch.setattr(conv, "LEAST_KERNEL_INPUT", 0)
    assert names(nn.Conv2d(4, 4, 1)) == {"gram", "materialize"}, "one place needs no kernel"
    assert names(nn.Conv2d(4, 4, 3, groups=2)) == {"materialize"}


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3, padding=1), WSConv2d(3, 4, 3, padding=1)])
def test_inner_products_are_made_for_as_many_examples_as_the_chunk_holds(monkeypatch, layer):
    standardised = isinstance(layer, WSConv2d)
    rule, context = (WSConv2dRule if standardised else Conv2dRule)(layer), RuleContext(choices=Choices("gram", EVEN))
    parameters = (layer.weight.detach(), layer.bias.detach(), None)[: 3 if standardised else 2]
    y, saved = rule.forward(torch.randn(5, 3, 4, 4), *parameters)
    g, wanted = torch.randn_like(y), (True, True, False)[: len(parameters)]
    whole = rule.squared_norms(saved, g, wanted, context)
    sizes = []
    real = type(rule)._squares_from_products
    monkeypatch.setattr(
        type(rule),
        "_squares_from_products",
        lambda self, saved, rows, *rest: sizes.append(len(rows)) or real(self, saved, rows, *rest),
    )
    one = rule._product_numbers(saved, g)
    assert one == rule._geometry.products_work(3, (4, 4), (4, 4))[2] + 3 * 16**2
    monkeypatch.setattr(conv, "chunk_floats", lambda g: 2 * one + 1)
    torch.testing.assert_close(rule.squared_norms(saved, g, wanted, context), whole)
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("d", "p"), [(5, 7), (7, 5)])
def test_gradients_of_a_linear_layer_come_a_chunk_at_a_time(monkeypatch, transposed, d, p):
    layer = nn.Linear(d, p)
    if transposed:
        layer.weight = nn.Parameter(layer.weight.t().detach().clone())
    rule, context = LinearRule(layer), RuleContext(own_group=True, choices=Choices("materialize", EVEN))
    monkeypatch.setattr(type(rule), "transposed", transposed)
    x, g = torch.randn(5, 3, d), torch.randn(5, 3, p)
    each = torch.einsum("btd,btp->bdp" if transposed else "btd,btp->bpd", x, g)
    for thin in (matrix.THIN, 0):
        monkeypatch.setattr(matrix, "THIN", thin)
        for floats, sizes in ((2 * d * p, [2, 2, 1]), (d * p - 1, [1] * 5), (10**6, [5])):
            monkeypatch.setattr(matrix, "chunk_floats", lambda x, floats=floats: floats)
            parts = [part.clone() for part in rule.gradient_chunks((x,), g, "materialize", context)]
            assert [len(part) for part in parts] == sizes
            formed = torch.cat(parts)
            kept = torch.empty_like(formed)
            assert [len(part) for part in rule.gradient_chunks((x,), g, "materialize", context, kept)] == sizes
            assert torch.equal(kept, formed)
            if rule._inputs_first(d, p) != transposed:
                formed = formed.mT
            torch.testing.assert_close(formed, each)
            saved = (x, layer.weight.detach())
            weight, bias = rule.clipped_sum(saved, g, torch.ones_like, (True, True), context)
            torch.testing.assert_close(weight, each.sum(0))
            torch.testing.assert_close(bias, g.sum((0, 1)))


@pytest.mark.parametrize("way", ["materialize", "materialize/kernel"])
@pytest.mark.parametrize(
    "make", [LAYERS["plain"], LAYERS["strided"], (lambda: nn.Conv2d(4, 6, 3, groups=2), (5, 4, 6, 6))]
)
def test_gradients_of_a_convolution_come_a_chunk_at_a_time(monkeypatch, make, way):
    make_layer, shape = make
    layer, x = make_layer(), torch.randn(5, *shape[1:])
    rule, context = Conv2dRule(layer), RuleContext(choices=Choices("materialize", EVEN))
    y, saved = rule.forward(x, layer.weight.detach(), layer.bias.detach())
    g = torch.randn_like(y)
    expected = []
    for i in range(5):
        (row,) = torch.autograd.grad((layer(x[i : i + 1]) * g[i : i + 1]).sum(), layer.weight)
        expected.append(rule._flatten(row))
    taken, real = [], Geometry.unfolded

    def spy(self, x, out, step, buffers):
        taken.append(step)
        return real(self, x, out, step, buffers)

    monkeypatch.setattr(Geometry, "unfolded", spy)
    size = layer.weight.numel()
    unfolded = max(rule._filter_size() * layer.groups * math.prod(g.shape[2:]), x[0].numel())
    for floats, most in ((10**7, 5), (2 * size, 2), (size - 1, 1), (2 * max(size, unfolded), None)):
        monkeypatch.setattr(conv, "chunk_floats", lambda g, floats=floats: floats)
        taken.clear()
        parts = [part.clone() for part in rule.gradient_chunks(saved, g, way, context)]
        kept = g.new_empty(5, *rule.gradient_shape(saved, g))
        assert [len(part) for part in rule.gradient_chunks(saved, g, way, context, kept)] == [len(p) for p in parts]
        assert torch.equal(kept, torch.cat(parts))
        torch.testing.assert_close(torch.cat(parts), torch.stack(expected), rtol=1e-4, atol=1e-4)
        if most is not None:
            assert [len(part) for part in parts] == [most] * (5 // most) + ([5 % most] if 5 % most else [])
        assert all(step == max(1, min(min(5, max(1, floats // size)), floats // unfolded)) for step in taken)


class _Copies(TorchDispatchMode):
    """Adds up the bytes that copies read and write."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "copy_":
            self.moved += 2 * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def test_rates_are_what_torch_counts_over_the_seconds_it_took(monkeypatch, recwarn):
    seen = []

    def timed(run, device, many=5):
        copies = _Copies()
        with copies:
            done = operations(run)
        seen.append((done, copies.moved, many))
        return 0.5

    monkeypatch.setattr(costs, "_seconds", timed)
    rates = measure_rates(torch.device("cpu"))
    counted = [done / 0.5 for done, _, _ in seen[:4]]
    assert [rates.matmul, rates.gram, rates.outer, rates.kernel] == counted
    assert all(5e7 < done < 2e9 for done, _, _ in seen[:4])
    assert rates.bytes == seen[4][1] / 0.5 > 1e8, "more than a cache holds"
    assert rates.calls == 2.0
    assert seen[5][:2] == (0, 0) and seen[5][2] >= 50, "a short kernel is started many times"
    assert not [w for w in recwarn if "resized" in str(w.message)], "results are written where there is room for them"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_time_is_the_best_mean_of_five_after_one_to_warm_up(monkeypatch, kind):
    now, waits = [0.0], []
    durations = iter([100.0, 3, 3, 1, 1.5, 2, 2, 9, 9, 4, 4])
    runs = []

    def run():
        now[0] += next(durations)
        runs.append(1)

    monkeypatch.setattr(costs.time, "process_time", lambda: now[0] if kind == "cpu" else 1 / 0)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0] if kind == "cuda" else 1 / 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    seconds = costs._seconds(run, torch.device(kind), many=2)
    assert seconds == (0.625 if kind == "cpu" else 1.25), "processor time is shared by the threads"
    assert len(runs) == 11
    assert len(waits) == (0 if kind == "cpu" else 10)


@pytest.mark.parametrize(("steps", "seconds"), [([0.0] * 5, 1e-3), ([0.0, 3.0, 0.0, 2.0, 4.0], 2.0)])
def test_a_clock_that_does_not_move_says_nothing(monkeypatch, steps, seconds):
    readings = iter(itertools.chain.from_iterable((10.0, 10.0 + step) for step in steps))
    monkeypatch.setattr(costs.time, "process_time", lambda: next(readings))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert costs._seconds(lambda: None, torch.device("cpu"), many=1) == seconds


def test_work_takes_the_sum_of_its_parts():
    assert EVEN.seconds(Work()) == 0.0
    rates = Rates(matmul=1.0, gram=2.0, outer=4.0, kernel=8.0, bytes=16.0, calls=32.0)
    assert rates.seconds(Work(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)) == 1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16 + 1 / 32


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_usual_rates_are_of_the_usual_sizes(kind):
    rates = costs.USUAL_RATES[kind]
    assert rates == (
        Rates(9e10, 8e10, 7e10, 8e10, 1e10, 5e4) if kind == "cpu" else Rates(2e13, 8e12, 8e12, 2e11, 1e12, 1e5)
    ), "where nothing is measured, choices are those of every run before"


def test_a_machine_has_a_name_and_a_number_of_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(costs.os, "cpu_count", lambda: 7)
    monkeypatch.setattr(costs.platform, "machine", lambda: "arm")
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(costs, "open", lambda path: {"/proc/cpuinfo": file}[path].open(), raising=False)
    for text, name in (("vendor: x\nmodel name\t: Fast CPU : 2\nmodel name: other\n", "Fast CPU : 2"), ("", "arm")):
        file.write_text(text)
        assert costs._processor() == f"{name}, 7 cores"
    monkeypatch.setattr(costs, "open", lambda path: (tmp_path / "none").open(), raising=False)
    for processor, name in (("i386", "i386"), ("", "arm")):
        monkeypatch.setattr(costs.platform, "processor", lambda processor=processor: processor)
        assert costs._processor() == f"{name}, 7 cores"


def test_rates_are_kept_for_each_number_of_threads_and_each_device(own_cache, monkeypatch):
    measured = []
    monkeypatch.setattr(costs, "measure_rates", lambda device: measured.append(device) or EVEN)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    costs.machine_rates.cache_clear()
    for kind, index, threads in (("cpu", 0, 1), ("cpu", 0, 2), ("cuda", 0, 1), ("cuda", 0, 2), ("cuda", 1, 1)):
        costs.machine_rates(kind, index, threads)
    assert measured == [torch.device(name) for name in ("cpu", "cpu", "cuda:0", "cuda:1")]
    costs.machine_rates.cache_clear()


def test_what_costs_are_made_of_cannot_be_changed():
    for thing, name in ((Work(), "bytes"), (EVEN, "bytes"), (Geometry((1,), (1,), (0,), (1,), 1), "kernel")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, 1.0)


def test_a_choice_is_made_once_for_a_size_and_is_the_cheapest():
    choices, asked = Choices(rates=EVEN), []

    def options():
        asked.append(1)
        return {"slow": Work(matmul=2e10), "fast": Work(matmul=1e10), "tie": Work(gram=1e10)}

    for _ in range(2):
        assert choices.choose((1,), torch.device("cpu"), options) == "fast"
    assert len(asked) == 1 and choices.last == (1,)
    assert choices[(1,)].seconds == {"slow": 2.0, "fast": 1.0, "tie": 1.0} and not choices[(1,)].forced
    forced = Choices("slow", EVEN)  # type: ignore[arg-type]
    assert forced.choose((2,), torch.device("cpu"), options) == "slow" and forced[(2,)].forced
