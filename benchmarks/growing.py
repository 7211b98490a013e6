"""Doubles the sizes of two small networks one at a time, and measures every method at each size in interleaved rounds.

The networks, a transformer and a convolutional one, are of plain layers, so that every size can be doubled alone.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.meters import Seconds, Stopwatch, peak_bytes
from benchmarks.methods import Method, make
from benchmarks.options import names, split
from benchmarks.workloads import Workload
from groupwise.analysis.benchmark_rows import METHODS, growth_factors, in_order

VOCABULARY, CLASSES = 512, 10


@dataclass(frozen=True)
class Sizes:
    """What can grow: examples, tokens (or pixels a side), features (or channels), blocks (or convolutions)."""

    batch: int
    length: int
    width: int
    layers: int

    def grown(self, axis: str, doublings: int) -> Sizes:
        """The same with one of them doubled so many times."""
        return replace(self, **{axis: getattr(self, axis) << doublings})


class Block(nn.Module):
    """A transformer block (pre-norm, causal, heads of 32 features)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        b, t, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    """A language model; the positions come in from outside, one row an example."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Two of (B, T) to logits (B, T, VOCABULARY)."""
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Losses = Callable[[nn.Module, slice | list[int]], Tensor]
"""A model and rows of the batch -> their losses, (n,)."""


def transformer(sizes: Sizes, device: str) -> tuple[nn.Module, Losses]:
    """The model, and what gives its losses: next-token, the mean over an example."""
    ids = torch.randint(VOCABULARY, (sizes.batch, sizes.length), device=device)
    positions = torch.arange(sizes.length, device=device).repeat(sizes.batch, 1)

    def losses(model: nn.Module, rows: slice | list[int]) -> Tensor:
        logits = model(ids[rows], positions[rows]).float()
        return F.cross_entropy(logits.transpose(1, 2), ids[rows].roll(-1, 1), reduction="none").mean(1)

    return Transformer(sizes).to(device), losses


def conv(sizes: Sizes, device: str) -> tuple[nn.Module, Losses]:
    """3 × 3 convolutions with GroupNorm, all of one width, and what gives the losses."""
    layers: list[nn.Module] = [nn.Conv2d(3, sizes.width, 3, padding=1)]
    for _ in range(sizes.layers):
        layers += [nn.GroupNorm(4, sizes.width), nn.ReLU(), nn.Conv2d(sizes.width, sizes.width, 3, padding=1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes.width, CLASSES)]
    images = torch.randn(sizes.batch, 3, sizes.length, sizes.length, device=device)
    labels = torch.randint(CLASSES, (sizes.batch,), device=device)

    def losses(model: nn.Module, rows: slice | list[int]) -> Tensor:
        return F.cross_entropy(model(images[rows]).float(), labels[rows], reduction="none")

    return nn.Sequential(*layers).to(device), losses


@dataclass(frozen=True)
class Network:
    """A network, the sizes it starts from and the axes it grows along."""

    make: Callable[[Sizes, str], tuple[nn.Module, Losses]]
    start: Sizes
    axes: tuple[str, ...]


NETWORKS = {
    "transformer": Network(
        transformer, Sizes(batch=8, length=32, width=128, layers=2), ("batch", "length", "width", "layers")
    ),
    "conv": Network(conv, Sizes(batch=8, length=16, width=16, layers=4), ("batch", "width", "layers")),
}


def build(network: str, sizes: Sizes, *, device: str = "cpu", dtype: str = "float32") -> Workload:
    """A network of these sizes with weights and data from one seed; bfloat16 runs it in autocast."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, losses = NETWORKS[network].make(sizes, device)

    def of_rows(rows: Sequence[int] | None) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            return losses(model, slice(None) if rows is None else list(rows))

    return Workload(network, model, of_rows, sizes.batch, sizes.layers, channels_last=False)


@dataclass
class GrowthOptions:
    """What the command line may say; see `benchmarks.growth.HELP`."""

    network: str = "all"
    axis: str = "all"
    method: str = "none,adaptive_layer,flat,ghost"
    doublings: int = 4
    rounds: int = 5
    steps: int = 2
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    limit: float = 20.0
    out: str = "results/measured/benchmarks"

    @property
    def methods(self) -> list[str]:
        """The names asked for, `none` first: factors are shown beside its own."""
        return list(dict.fromkeys(["none", *split(self.method)]))

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Networks and axes."""
        return [
            (network, axis)
            for network in names("network", self.network, NETWORKS)
            for axis in (NETWORKS[network].axes if self.axis == "all" else split(self.axis))
        ]


def measure(network: str, axis: str, options: GrowthOptions) -> list[dict[str, Any]]:
    """Rows of one axis, without provenance: one for each size, method and round.

    It ends early where the next doubling of the slowest method would take more than `options.limit` seconds a step, if
    time grew there as it last did.
    """
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    slowest: list[float] = []
    for doubling in range(options.doublings + 1):
        if slowest and slowest[-1] * (slowest[-1] / slowest[-2] if len(slowest) > 1 else 2.0) > options.limit:
            print(f"{network}: {axis} ends here, a step would take more than {options.limit:g} s", file=sys.stderr)
            break
        sizes = NETWORKS[network].start.grown(axis, doubling)
        print(f"{network}: {axis} {getattr(sizes, axis)}", file=sys.stderr, flush=True)
        found = _measure(network, sizes, options)
        slowest.append(max(_counting(row, options.device) for row in found))
        rows += [{"axis": axis, "value": getattr(sizes, axis), **row} for row in found]
    return rows


def _measure(network: str, sizes: Sizes, options: GrowthOptions) -> list[dict[str, Any]]:
    peaks = {method: _peak(method, network, sizes, options) for method in options.methods}
    running: dict[str, tuple[Method, int]] = {}
    for method in options.methods:
        workload = build(network, sizes, device=options.device, dtype=options.dtype)
        running[method] = make(method, workload), sum(p.numel() for p in workload.model.parameters())
    rows = []
    for number in range(options.rounds):
        for method, (way, parameters) in running.items():
            taken = _time(way, options)
            rows.append(
                {
                    "network": network,
                    "method": method,
                    **vars(sizes),
                    "parameters": parameters,
                    "device": options.device,
                    "threads": options.threads,
                    "dtype": options.dtype,
                    "round": number,
                    "steps": options.steps,
                    "cpu_seconds": taken.cpu,
                    "wall_seconds": taken.wall,
                    "peak_bytes": peaks[method],
                    "status": "ok",
                }
            )
    return rows


def _peak(method: str, network: str, sizes: Sizes, options: GrowthOptions) -> int:
    gc.collect()  # what is freed in between must not count

    def step() -> Any:
        return make(method, build(network, sizes, device=options.device, dtype=options.dtype)).step

    return peak_bytes(step, options.device)[0]


def _time(method: Method, options: GrowthOptions) -> Seconds:
    method.step()
    watch = Stopwatch(options.device)
    for _ in range(options.steps):
        method.step()
    seconds = watch.read(options.steps)
    method.clear()
    return seconds


def _counting(row: dict[str, Any], device: str) -> float:
    return row["wall_seconds"] if device == "cuda" else row["cpu_seconds"]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What the command prints of one axis: the factors of each doubling, those of non-private training beside them."""
    table = growth_factors(pd.DataFrame(list(rows)))
    lines = [f"\n{rows[0]['network']}, {rows[0]['axis']}: time (none's), memory (none's)"]
    for method in in_order(table["method"].unique()):
        for step in table[table["method"] == method].itertuples():
            lines.append(
                f"  {METHODS.get(method, method):20} {step.start:>5g} to {step.end:<5g} "
                f"{step.time:5.2f} ({step.none_time:.2f})  {step.memory:5.2f} ({step.none_memory:.2f})"
            )
    return "\n".join(lines)
