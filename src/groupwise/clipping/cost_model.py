"""Predicts by this machine's costs how a layer's norms are found fastest, and finds those of GᵀX by inner products."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from groupwise.cache import read_cache, write_cache
from groupwise.clipping.norm_terms import GramTerms, Terms, squares_together
from groupwise.clipping.precision import batched_product, keeps_half, longest_sum, rounding_slack, upcast

Formula = Literal["auto", "gram", "materialize"]


@dataclass(frozen=True)
class Work:
    """What one call of a layer costs in its backward pass, one field a resource."""

    matmul: float = 0.0
    """Operations (a multiply-add is two) in one product, or one convolution, over the whole batch."""
    gram: float = 0.0
    """Operations in T×T products, one an example."""
    outer: float = 0.0
    """Operations in p×d products, one an example."""
    kernel: float = 0.0
    """Operations in convolution kernels that take one example at a time."""
    bytes: float = 0.0
    """Bytes written or read again."""
    calls: float = 0.0
    """Kernels started beyond one a batch."""
    lost: float = 0.0
    """Operations of p×d products that would have taken the time which products in parts lose; none are done."""


@dataclass(frozen=True)
class Rates:
    """How much of each field of `Work` a device does in a second (same fields, same order, but for `lost`)."""

    matmul: float
    gram: float
    outer: float
    kernel: float
    bytes: float
    calls: float

    def seconds(self, work: Work) -> float:
        """Time that the work takes."""
        *amounts, lost = astuple(work)
        return sum(amount / rate for amount, rate in zip(amounts, astuple(self), strict=True)) + lost / self.outer


USUAL_RATES = {
    "cpu": Rates(matmul=9e10, gram=8e10, outer=7e10, kernel=8e10, bytes=1e10, calls=5e4),
    "cuda": Rates(matmul=2e13, gram=8e12, outer=8e12, kernel=2e11, bytes=1e12, calls=1e5),
}
"""For machines whose cache folder cannot be written: choices must not change from one run to the next."""


@dataclass(frozen=True)
class Decision:
    """A choice, and what it was made from."""

    chosen: str
    seconds: dict[str, float]
    work: dict[str, Work]
    forced: bool


class Choices(dict[tuple[Any, ...], Decision]):
    """One layer's decisions, by (input sizes, output sizes, whatever else the costs depend on).

    Args:
        formula: "auto", or the formula to use wherever a layer has it.
        rates: what arithmetic costs; None measures it, or reads what was measured.
    """

    def __init__(self, formula: Formula = "auto", rates: Rates | None = None) -> None:
        super().__init__()
        self.formula, self.rates = formula, rates
        self.last: tuple[Any, ...] | None = None

    def choose(self, key: tuple[Any, ...], device: torch.device, options: Callable[[], dict[str, Work]]) -> str:
        """The way to go for this key: decided once, then remembered."""
        self.last = key
        decision = self.get(key)
        if decision is None:
            decision = self[key] = self._decide(options(), device)
        return decision.chosen

    def _decide(self, options: dict[str, Work], device: torch.device) -> Decision:
        """The cheapest option; a forced formula leaves only those that bear its name (all, if none does)."""
        named = {name: work for name, work in options.items() if name.startswith(self.formula)}  # "auto": none
        rates = self.rates or machine_rates(device.type, device.index or 0, torch.get_num_threads())
        seconds = {name: rates.seconds(work) for name, work in options.items()}
        return Decision(min(named or options, key=seconds.__getitem__), seconds, options, bool(named))


@lru_cache
def machine_rates(kind: str, index: int, threads: int) -> Rates:
    """This machine's rates for a device: cached on disk, or measured now and cached."""
    device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if kind == "cuda" else _processor()
    key = {"device": name, "threads": threads if kind == "cpu" else None, "torch": torch.__version__, "measure": 1}
    try:
        return Rates(**read_cache("rates", key))  # type: ignore[arg-type]
    except TypeError:  # nothing there, or something else
        rates = measure_rates(device)
    return rates if write_cache("rates", key, asdict(rates)) else USUAL_RATES.get(kind, USUAL_RATES["cuda"])


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            name = next(lines, platform.machine())
    except OSError:
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def measure_rates(device: torch.device) -> Rates:
    """Time one typical shape of each kind of work in float32, best of five."""

    def new(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    with torch.no_grad():
        a, b, c = new(1024, 768), new(768, 1024), new(1024, 1024)
        rows, products = new(8, 64, 1024), new(8, 64, 64)
        left, right, outers = new(4, 128, 256), new(4, 256, 1152), new(4, 128, 1152)
        source, target = new(1 << 24), new(1 << 24)
        x, w, g = new(1, 64, 32, 32), new(64, 64, 3, 3), new(1, 64, 32, 32)
        small = new(8)
        backward = torch.ops.aten.convolution_backward
        mask = [False, True, False]
        return Rates(
            matmul=2 * a.numel() * 1024 / _seconds(lambda: torch.mm(a, b, out=c), device),
            gram=2 * products.numel() * 1024 / _seconds(lambda: torch.bmm(rows, rows.mT, out=products), device),
            outer=2 * outers.numel() * 256 / _seconds(lambda: torch.bmm(left, right, out=outers), device),
            kernel=2 * w.numel() * 1024
            / _seconds(lambda: backward(g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask), device),
            bytes=8 * source.numel() / _seconds(lambda: target.copy_(source), device),
            calls=1 / _seconds(lambda: small.add_(1), device, many=100),
        )  # fmt: skip


def _seconds(run: Callable[[], object], device: torch.device, many: int = 5) -> float:
    """The best of five means over `many` calls; on a CPU of processor time, so that other programs count less.

    A clock that did not move (some systems count processor time in ticks) says nothing.
    """

    def clock() -> float:
        if device.type == "cpu":
            return time.process_time() / torch.get_num_threads()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    best = float("inf")
    run()
    for _ in range(5):
        start = clock()
        for _ in range(many):
            run()
        if (taken := clock() - start) > 0:
            best = min(best, taken / many)
    return best if best < float("inf") else 1e-3


LEAST_SPLIT = 1 << 22
"""Products (B·T·d times T) from which a processor gains by leaving out a quarter of a symmetric matrix."""
LONG = 16
"""How many times as many numbers rows have as their inner products, if these are kept for the rows' lengths."""
CHUNK_FLOATS = 1 << 24
"""Numbers that the inner products, or gradients, of one chunk of examples may hold, so as not to fill the memory."""


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """ABᵀ (B, T, S) of a (B, T, d) and b (B, S, d), long rows a part at a time."""
    most = longest_sum(a.device)
    if a.shape[2] <= most:
        return batched_product(a, b.mT)
    parts = zip(a.split(most, 2), b.split(most, 2), strict=True)
    first, other = next(parts)
    products = batched_product(first, other.mT)
    for part, other in parts:
        if keeps_half(part, other):
            products += batched_product(part, other.mT)
        else:
            torch.baddbmm(products, upcast(part), upcast(other).mT, out=products)
    return products


def self_products(x: Tensor) -> Tensor:
    """XXᵀ (B, T, T) of x (B, T, d); on a CPU the upper right quarter is copied from the lower left."""
    rows = x.shape[1]
    if x.device.type != "cpu" or rows < 32 or x.numel() * rows < LEAST_SPLIT:
        return inner_products(x, x)
    half = rows // 2
    products = x.new_empty(x.shape[0], rows, rows)
    products[:, half:] = inner_products(x[:, half:], x)
    products[:, :half, :half] = inner_products(x[:, :half], x[:, :half])
    products[:, :half, half:] = products[:, half:, :half].mT
    return products


class LastProducts:
    """XXᵀ of the last input asked for: layers that read the same input (query, key, value) share it.

    Of long output gradients GGᵀ is noted as well: the lengths of their rows are in it, which cross terms ask for.
    """

    def __init__(self) -> None:
        self._inputs: _Known | None = None
        self._long: _Known | None = None
        self.reused = 0

    def of(self, x: Tensor) -> Tensor:
        """XXᵀ (B, T, T) of x (B, T, d); not to be changed."""
        if self._inputs is not None and self._inputs.is_of(x):
            self.reused += 1
            return self._inputs.products
        products = self_products(x)
        self._inputs = _Known(x, products)
        return products

    def note(self, g: Tensor, products: Tensor) -> None:
        """GGᵀ (B, T, T) of g (B, T, p) is kept until the next one, if it is much smaller."""
        self._long = _Known(g, products) if LONG * products.numel() < g.numel() else None

    def lengths(self, g: Tensor) -> Tensor | None:
        """‖row‖ (B, T) of the g that was noted last; None if it is another."""
        if self._long is None or not self._long.is_of(g):
            return None
        return self._long.products.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt_()

    def clear(self) -> None:
        """Let go of what is held."""
        self._inputs = self._long = None


class _Known:
    """Products of a tensor that is not kept alive; while it lives, no other tensor can have its address."""

    def __init__(self, of: Tensor, products: Tensor) -> None:
        self._key, self._alive, self.products = _key(of), StorageWeakRef(of.untyped_storage()), products

    def is_of(self, t: Tensor) -> bool:
        return self._key == _key(t) and not self._alive.expired()


def _key(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t._version


def gram_norms(x: Tensor, g: Tensor, bias: bool) -> Tensor:
    """‖GᵀX‖² (+ ‖Σ_t G‖² with bias) of each example; x (B, T, d), g (B, T, p) -> (B,), float64, not under-stated."""
    return squares_together([[gram_terms(x, g, bias)]])[0]


def gram_terms(x: Tensor, g: Tensor, bias: bool, shared: LastProducts | None = None) -> Terms | Tensor:
    """The same, or what it is made of."""
    step = max(1, CHUNK_FLOATS // max(1, x.shape[1] ** 2))
    if step < x.shape[0]:
        parts = zip(x.split(step), g.split(step), strict=True)
        return torch.cat([gram_norms(x_part, g_part, bias) for x_part, g_part in parts])
    xx, gg = self_products(x) if shared is None else shared.of(x), self_products(g)
    if shared is not None:
        shared.note(g, gg)
    return GramTerms(xx, gg, bias, max(x.shape[1], x.shape[2], g.shape[2]))


def norms_from_products(xx: Tensor, gg: Tensor, bias: bool, longest: int) -> Tensor:
    """The same from XXᵀ and GGᵀ, (B, T, T) each; `longest` is the largest number of terms in any of their sums."""
    return squares_together([[GramTerms(xx, gg, bias, longest)]])[0]


@dataclass(frozen=True)
class OuterProducts:
    """One example's weight gradient as Σ_t left_t rightᵀ_t: rows (B, T, p), or indices (B, T) for one-hot rows."""

    left: Tensor
    right: Tensor
    lengths: Tensor | None = None
    """‖left_t‖ (B, T), if it is known."""

    def inner(self, other: "OuterProducts") -> Tensor:
        """⟨Σ_t l_t r_tᵀ, Σ_s l'_s r'_sᵀ⟩ = Σ_ts (l_t·l'_s)(r_t·r'_s) of each example, (B,), not under-stated."""
        products = (_products(self.left, other.left) * inner_products(self.right, other.right)).sum((1, 2))
        return products + rounding_slack(self._size() * other._size(), max(self.right.shape[1:]))

    def _size(self) -> Tensor:
        """Σ_t ‖l_t‖‖r_t‖, (B,): what the inner products are made of, before anything cancels."""
        lengths = _lengths(self.right)
        if self.left.is_floating_point():
            lengths = lengths * (_lengths(self.left) if self.lengths is None else self.lengths)
        return lengths.sum(1)


def _lengths(rows: Tensor) -> Tensor:
    """‖row‖ (B, T) of rows (B, T, n), float32 at least."""
    return torch.linalg.vector_norm(rows, dim=2, dtype=torch.promote_types(rows.dtype, torch.float32))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(B, T, S) inner products of rows; an integer tensor stands for one-hot rows."""
    if a.is_floating_point() and b.is_floating_point():
        return inner_products(a, b)
    if not a.is_floating_point() and not b.is_floating_point():
        return a.unsqueeze(2) == b.unsqueeze(1)
    if b.is_floating_point():
        return _products(b, a).mT
    return a.gather(2, b.unsqueeze(1).expand(-1, a.shape[1], -1))
