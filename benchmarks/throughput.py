"""Compares speed and memory with non-private training:  python -m benchmarks.throughput workload=mlp method=all

Each method runs in its own process, in interleaved rounds. The rows of a case are written and printed as soon as it is
done. `docs/benchmarks.md` explains how to read them.

  python -m benchmarks.throughput workload=gpt2_untied
  python -m benchmarks.throughput workload=gpt2 method=flat,adaptive_layer batch=1,2,4,8 rounds=3
  python -m benchmarks.throughput device=cuda dtype=bfloat16 workload=gpt2 batch=64 layers=12

Workloads: wrn16_4_ws, wrn16_4_conv, roberta_base, gpt2, gpt2_untied, mlp, lora_gpt2, llama, lora_llama. "all" omits
gpt2_64 (64 tokens) and lora_gpt2_xl.
Methods: none (always measured, for the ratios), none_matmul (none, with our matrix products), flat, ghost, fixed_layer,
adaptive_layer, block, opacus_hooks, opacus_functorch, opacus_ghost, opacus_per_layer; with peers= also fastdp_layer,
fastdp_flat and private_transformers. "all" omits none_again, which is none in a second process and shows the timing
noise.
"""

import sys
from dataclasses import dataclass
from itertools import product

from benchmarks import research_peers
from benchmarks.driver import run
from benchmarks.job import Job
from benchmarks.methods import METHODS, RECORDED
from benchmarks.options import command, device, names, option, out, sizes
from benchmarks.results import THROUGHPUT, with_ratios
from benchmarks.workloads import WORKLOADS


@dataclass
class Options:
    """The options of the command line."""

    workload: str = option("all", "all, or some of them, separated by commas")
    method: str = option("all", "all, or some of them, separated by commas")
    batch: str | None = option(None, "batch sizes, separated by commas; default: the workload's own")
    layers: int = option(4, "transformer blocks; the full shapes have 12, llama 30, lora_gpt2_xl 48")
    rounds: int = option(5, "timed rounds of each method")
    steps: int = option(3, "timed steps of a round, after one warm-up step")
    threads: int = option(1, "threads of each process; processes run one at a time")
    device: str = device("cpu")
    dtype: str = option("float32", "float32, bfloat16 (autocast) or float64", among=("float32", "bfloat16", "float64"))
    limit: float = option(900.0, "seconds that one measurement or round of a method may take")
    out: str = out("throughput.csv")
    peers: str | None = option(None, "a folder with checkouts of fast-differential-privacy and private-transformers")
    tiny: bool = option(False, "true: the smallest sizes, to test the command quickly")

    @property
    def methods(self) -> list[str]:
        """The chosen methods, `none` first."""
        if self.method != "all":
            return names("method", self.method, [*METHODS, *RECORDED], first="none")
        left_out = ["none_again", *([] if self.peers else filter(research_peers.package_of, METHODS))]
        return [name for name in METHODS if name not in left_out]

    @property
    def batches(self) -> list[int | None]:
        """The chosen batch sizes; None is the default of a workload."""
        return [None] if self.batch is None else [*sizes("batch", self.batch)]


def cases(options: Options) -> list[Job]:
    """One job for each workload and batch size; `benchmarks.driver` sets its method.

    Raises:
        UserError: an unknown name.
    """
    every = [name for name, kind in WORKLOADS.items() if kind.in_all]
    workloads = every if options.workload == "all" else names("workload", options.workload, WORKLOADS)
    return [
        Job(
            workload=workload,
            method="none",
            batch=batch,
            layers=None if options.tiny or WORKLOADS[workload].layers is None else options.layers,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            tiny=options.tiny,
        )
        for workload, batch in product(workloads, options.batches)
    ]


def measure(options: Options) -> None:
    """Run all cases."""
    todo, chosen = cases(options), options.methods
    if options.peers:
        research_peers.put_on_path(options.peers)
    for case in todo:
        rows = with_ratios(run(case, chosen, options.rounds, options.steps, options.limit))
        THROUGHPUT.add(options.out, rows)


main = command(Options, measure)

if __name__ == "__main__":
    sys.exit(main())
