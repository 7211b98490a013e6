"""One private step by microbatch, precision and layout, with profiles:  python -m benchmarks.device_steps out=FOLDER

Each row describes the forward and clipped backward pass of one microbatch: wall time, kernel time on the GPU, peak
memory, and the number of kernels (on a CPU, of operations). A profile of the operations is written beside the rows.
Combinations that the file already has are not measured again.

Workloads: wrn16_4_ws, gpt2, roberta_base. Exit codes are those of `benchmarks.device_table`.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_table import AGAIN, LEFT, SIZES
from benchmarks.job import Job
from benchmarks.meters import peak_bytes, timed
from benchmarks.methods import METHODS, prepare
from benchmarks.options import command, device, names, option, out, sizes, split
from benchmarks.results import Table, hardware
from benchmarks.worker import is_lost
from groupwise.clipping.precision import full_float32
from groupwise.training.from_config import autocast
from groupwise.training.memory import is_oom

CASE = ("workload", "microbatch", "precision", "layout", "method")
TABLE = Table("device_steps.csv", (*CASE, "device", "hardware"), (*CASE, "seconds", "launches", "status"))
KERNELS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel")


@dataclass
class StepOptions:
    """The options of the command line."""

    workload: str = option("wrn16_4_ws", "wrn16_4_ws, gpt2 or roberta_base", among=tuple(SIZES))
    device: str = device("cuda")
    microbatch: str = option("256,512,1024", "microbatch sizes, separated by commas")
    precision: str = option("float32,tf32,bfloat16", "precisions, separated by commas; tf32 needs a GPU")
    layout: str = option("channels_last,contiguous", "memory formats of images and convolutions, separated by commas")
    method: str = option("adaptive_layer", "none, adaptive_layer, flat, ghost; several separated by commas")
    repeats: int = option(5, "timed steps after two warm-up steps; a row holds their median")
    limit: float = option(240.0, "seconds after which no further combination is started")
    out: str = out("device_steps.csv and the profiles")
    tiny: bool = option(False, "true: the smallest sizes, to test the command quickly")


def step_row(job: Job, precision: str, options: StepOptions) -> dict[str, Any]:
    """Measure one combination and write its profile; a combination that does not run gets a row with the reason."""
    device = torch.device(options.device)
    row: dict[str, Any] = {"workload": job.named, "microbatch": job.batch, "precision": precision}
    row |= {"layout": job.memory_format, "method": job.method, "device": options.device}
    try:
        precise = autocast(precision, device)
        with full_float32():
            workload, prepared = prepare(job)
            plain = workload.losses

            def losses(rows: Sequence[int] | None) -> torch.Tensor:
                with precise():
                    return plain(rows)

            workload.losses = losses
            peak, step = peak_bytes(lambda: prepared.step, options.device)
            taken = [timed(step, 1, device).wall for _ in range(options.repeats)]
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
            with profile(activities=activities) as profiler:
                step()
    except Exception as error:  # out of memory, or not supported: reported in the row
        first = "out of memory" if is_oom(error) else next(iter(str(error).splitlines()), type(error).__name__)
        return row | {"status": f"refused: {first}"}
    finally:
        if device.type == "cuda":
            with suppress(RuntimeError):  # raised again if a kernel broke the GPU for this process
                torch.cuda.empty_cache()
    found, on_gpu = profiler.key_averages(), device.type == "cuda"
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    name = f"profile-{job.named}-{job.method}-{job.batch}-{precision}-{job.memory_format}.txt".replace(" ", "-")
    (Path(options.out) / name).write_text(found.table(sort_by=order, row_limit=40, max_name_column_width=70))
    seconds = statistics.median(taken)
    started = (each.count for each in found if (each.key in KERNELS if on_gpu else each.key.startswith("aten::")))
    kernels = sum(each.self_device_time_total for each in found if each.device_type == DeviceType.CUDA)
    return row | {
        "seconds": seconds,
        "device_seconds": kernels / 1e6 if on_gpu else None,
        "examples_per_second": (job.batch or 0) / seconds,
        "peak_bytes": peak,
        "launches": sum(started),
        "status": "ok",
    }


def measure(options: StepOptions) -> int:
    """Measure the combinations that the file lacks; write and print each row as soon as it is measured.

    Returns:
        The exit code: 0, `LEFT` if the time limit was reached, or `AGAIN` if a kernel broke the GPU for this process.
    """
    methods, microbatches = names("method", options.method, METHODS), sizes("microbatch", options.microbatch)
    began = time.monotonic()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    done = set(TABLE.rows(options.out)[[*TABLE.key]].itertuples(index=False, name=None))
    _, layers, tokens = (None, None, None) if options.tiny else SIZES[options.workload]
    cases = product(split(options.layout), microbatches, split(options.precision), methods)
    for layout, size, precision, method in cases:
        job = Job(options.workload, method, layout, size, layers, tokens, options.device, tiny=options.tiny)
        if (job.named, str(size), precision, layout, method, options.device, hardware(options.device)) in done:
            continue
        if time.monotonic() - began > options.limit:
            print(f"time limit reached before microbatch={size} precision={precision} layout={layout}", file=sys.stderr)
            return LEFT
        row = step_row(job, precision, options)
        TABLE.add(options.out, [row])
        if row["status"] != "ok" and is_lost(options.device):
            print("error: this process can no longer use the GPU: repeat the command", file=sys.stderr)
            return AGAIN
    return 0


main = command(StepOptions, measure)

if __name__ == "__main__":
    sys.exit(main())
