"""Measures what doubling a size costs:  python -m benchmarks.growth network=transformer axis=length

Step time and peak memory as batch, sequence length, width and number of layers double, beside non-private training.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.growing import NETWORKS, Sizes, build
from benchmarks.meters import Step, peak_bytes, timed
from benchmarks.methods import METHODS, make
from benchmarks.options import command, device, names, option, out
from benchmarks.results import MACHINE, Table, seconds_of

SHOWN = ("network", "axis", "value", "method", "cpu_seconds", "wall_seconds", "peak_bytes")
TABLE = Table("growth.csv", ("network", "axis", "method", *MACHINE), SHOWN)  # all sizes of an axis are replaced


@dataclass
class GrowthOptions:
    """What the command line may say."""

    network: str = option("all", "transformer, conv; several by commas")
    axis: str = option("all", "batch, length, width, layers (conv: no length); several by commas")
    method: str = option("none,adaptive_layer,flat,ghost", "several by commas")
    doublings: int = option(4, "of each size, from the network's own")
    rounds: int = option(5, "how often each method has its turn at each size")
    steps: int = option(2, "steps on the clock in a turn, after one to warm up")
    threads: int = option(1, "of torch")
    device: str = device("cpu")
    dtype: str = option("float32", "or bfloat16 (autocast)", among=("float32", "bfloat16"))
    limit: float = option(20.0, "seconds: an axis ends before a step would take longer")
    out: str = out("growth.csv")

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Networks and axes.

        Raises:
            UserError: an axis that a network has not.
        """
        networks = names("network", self.network, NETWORKS)
        return [(each, axis) for each in networks for axis in names(f"{each} axis", self.axis, NETWORKS[each].axes)]


def measure(network: str, axis: str, methods: Sequence[str], options: GrowthOptions) -> list[dict[str, Any]]:
    """Rows of one axis: one for each size, method and round.

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
        value = getattr(sizes, axis)
        print(f"{network}: {axis} {value}", file=sys.stderr, flush=True)
        place = {"network": network, "axis": axis, "value": value}
        found = [place | row for row in _rows(network, sizes, methods, options)]
        slowest.append(max(map(seconds_of, found)))
        rows += found
    return rows


def _rows(network: str, sizes: Sizes, methods: Sequence[str], options: GrowthOptions) -> list[dict[str, Any]]:
    new = partial(build, network, sizes, device=options.device, dtype=options.dtype)

    def first_step(method: str) -> Step:
        return make(method, new()).step

    peaks = {method: peak_bytes(partial(first_step, method), options.device)[0] for method in methods}
    running = {method: make(method, new()) for method in methods}
    parameters = sum(p.numel() for p in new().model.parameters())
    rows = []
    for number in range(options.rounds):
        for method, way in running.items():
            way.step()
            taken = timed(way.step, options.steps, options.device)
            way.clear()
            row = {"method": method, **vars(sizes), "parameters": parameters}
            row |= {"device": options.device, "threads": options.threads, "dtype": options.dtype, "round": number}
            row |= {"steps": options.steps, "cpu_seconds": taken.cpu, "wall_seconds": taken.wall}
            rows.append(row | {"peak_bytes": peaks[method], "status": "ok"})
    return rows


def run(options: GrowthOptions) -> None:
    """Measure every axis; its rows are written and printed as soon as it is done."""
    methods = names("method", options.method, METHODS, first="none")
    for network, axis in options.cases:
        TABLE.add(options.out, measure(network, axis, methods, options))


main = command(GrowthOptions, run)

if __name__ == "__main__":
    sys.exit(main())
