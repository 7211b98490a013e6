"""One private step by microbatch, precision and layout, with profiles; of WRN16-4 unless another is named:

python -m benchmarks.device_steps out=FOLDER

Each row is the forward and clipped backward pass of one microbatch (adaptive per layer): seconds, those of the GPU
itself, peak memory, kernels or operations. The profile of the operations lies beside the rows. What is in the file is
not measured again. `--help` lists the options.
"""

import csv
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.device_table import AGAIN, LEFT, SIZES
from benchmarks.job import Job
from benchmarks.options import check_above_zero, check_device, command, names, read, split
from benchmarks.worker import is_lost

FILE = "device_steps.csv"
KEY = ("workload", "microbatch", "precision", "layout", "method", "device", "hardware")
COLUMNS = (
    *KEY,
    *("seconds", "device_seconds", "examples_per_second", "peak_bytes", "launches", "status", "commit", "dirty"),
    *("torch", "python", "date"),
)
HELP = """python -m benchmarks.device_steps [key=value ...]

  out=results/measured/benchmarks   the folder of device_steps.csv and the profiles
  workload=wrn16_4_ws               or gpt2, roberta_base: one
  device=cuda      or cpu
  microbatch=256,512,1024           examples
  precision=float32,tf32,bfloat16   tf32 is on a GPU alone
  layout=channels_last,contiguous   of images and convolutions
  method=adaptive_layer             or none, flat, ghost; several by commas
  repeats=5        timed steps, after two to warm up; the median counts
  limit=240        seconds; what is not begun by then is left out
  tiny=false       true: the smallest network, to see that everything runs"""


@dataclass
class StepOptions:
    """What the command line may say; see `HELP`."""

    out: str = "results/measured/benchmarks"
    workload: str = "wrn16_4_ws"
    device: str = "cuda"
    microbatch: str = "256,512,1024"
    precision: str = "float32,tf32,bfloat16"
    layout: str = "channels_last,contiguous"
    method: str = "adaptive_layer"
    repeats: int = 5
    limit: float = 240.0
    tiny: bool = False


def step_row(
    microbatch: int, precision: str, layout: str, method: str, options: StepOptions, folder: Path
) -> dict[str, Any]:
    """Measure one combination and write its profile; a refusal is a row too."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.meters import Stopwatch, peak_bytes
    from benchmarks.methods import prepare
    from groupwise.training.arithmetic import arithmetic
    from groupwise.training.from_config import autocast
    from groupwise.training.memory import is_oom

    device = torch.device(options.device)
    row: dict[str, Any] = {"workload": workload_of(options), "microbatch": microbatch}
    row |= {"precision": precision, "layout": layout, "method": method, "device": options.device}
    _, layers, tokens = (None, None, None) if options.tiny else SIZES[options.workload]
    job = Job(options.workload, method, layout, microbatch, layers, tokens, device=options.device, tiny=options.tiny)
    try:
        precise = autocast(precision, device)
        with arithmetic(device):
            workload, prepared = prepare(job)
            plain = workload.losses

            def losses(rows: Sequence[int] | None) -> torch.Tensor:
                with precise():
                    return plain(rows)

            workload.losses = losses
            peak, step = peak_bytes(lambda: prepared.step, options.device)
            taken = []
            for _ in range(options.repeats):
                watch = Stopwatch(device)
                step()
                taken.append(watch.read(1).wall)
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
            with profile(activities=activities) as profiler:
                step()
    except Exception as error:  # a device that runs out, or refuses, is told and the others go on
        first = "out of memory" if is_oom(error) else next(iter(str(error).splitlines()), type(error).__name__)
        return row | {"status": f"refused: {first}"}
    finally:
        if device.type == "cuda":
            with suppress(RuntimeError):  # of a kernel that broke the GPU for this process, which is in the row
                torch.cuda.empty_cache()
    found = profiler.key_averages()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    profile_table = found.table(sort_by=order, row_limit=40, max_name_column_width=70)
    name = f"profile-{row['workload']}-{method}-{microbatch}-{precision}-{layout}.txt".replace(" ", "-")
    (folder / name).write_text(profile_table)
    seconds = statistics.median(taken)
    launches = sum(
        each.count for each in found if each.key in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel")
    )
    if device.type != "cuda":
        launches = sum(each.count for each in found if each.key.startswith("aten::"))
    return row | {
        "seconds": seconds,
        "device_seconds": sum(each.self_device_time_total for each in found) / 1e6 if device.type == "cuda" else None,
        "examples_per_second": microbatch / seconds,
        "peak_bytes": peak,
        "launches": launches,
        "status": "ok",
    }


def workload_of(options: StepOptions) -> str:
    """The name that its rows have."""
    return Job(options.workload, options.method, tiny=options.tiny).named


def run(options: StepOptions) -> int:
    """Measure what the file lacks; each row is written and printed as soon as it is there.

    Returns:
        The exit code: 0; `LEFT` where time was up, `AGAIN` where a kernel broke the GPU for this process.
    """
    from benchmarks.results import merge, provenance

    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    path, source, began = folder / FILE, provenance(options.device), time.monotonic()
    done = set()
    if path.exists():
        with path.open(newline="") as lines:
            done = {tuple(row[name] for name in KEY) for row in csv.DictReader(lines)}
    sizes = [int(size) for size in split(options.microbatch)]
    ways = product(split(options.layout), sizes, split(options.precision), split(options.method))
    for layout, microbatch, precision, method in ways:
        asked = (str(microbatch), precision, layout, method, options.device, str(source["hardware"]))
        if (workload_of(options), *asked) in done:
            continue
        if time.monotonic() - began > options.limit:
            print(f"time is up before microbatch={microbatch} precision={precision} layout={layout}", file=sys.stderr)
            return LEFT
        row = step_row(microbatch, precision, layout, method, options, folder)
        merge(path, [row | source], COLUMNS, KEY)
        shown = (
            row["status"] if row["status"] != "ok" else f"{1000 * row['seconds']:.1f} ms, {row['launches']} launches"
        )
        print(f"microbatch {microbatch:5d}  {precision:9s} {layout:13s} {method:15s} {shown}", flush=True)
        if row["status"] != "ok" and is_lost(options.device):
            print("error: the GPU is lost to this process: give the command again", file=sys.stderr)
            return AGAIN
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""

    def work(given: list[str]) -> int:
        options = read(StepOptions, given)
        check_above_zero(options, "repeats", "limit")
        check_device(options.device)
        names("workload", options.workload, SIZES)
        return run(options)

    return command(work, HELP, "the rows that were done are written", arguments)


if __name__ == "__main__":
    sys.exit(main())
