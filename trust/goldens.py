"""Compare current numbers with frozen ones: `python -m trust.goldens`, or some parts: `... hashes plans`.

`python -m trust.goldens freeze` writes results/trust/goldens.json; with names of parts it renews only those. It never
removes a value: do that by hand. Without `freeze` each part is computed again and compared:

    hashes         the hash of the configuration of every committed row
    noise          the noise multiplier of every committed row, to 1e-3
    plans          noise multipliers and epsilons of 20 privacy plans, to 1e-3
    runs           twelve short runs of run.py whose noise follows from the seed: bits, epsilon and metrics
    private        three models trained by make_private: bits and loss
    architectures  the verdicts in results/trust/models.csv; `python -m trust.models` is not run again
    resumption     a killed and resumed run ends with the bits of an undisturbed one

A run whose bits differ but whose metrics are within a point has "moved"; --allow-moved accepts that. Everything else
that differs or is missing is printed, and the exit code is 1. Other commands check layers in every mode, audits and
planted bugs: `make test`, `make audit` and `python -m trust.planted_bugs`.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import groupwise
from benchmarks.results import hardware
from groupwise.atomic import write_text
from groupwise.config.compose import compose_run, register
from groupwise.config.identity import config_hash
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, command, unknown
from groupwise.privacy import NoiseSource, make_plan
from groupwise.rows import METRICS, Row, read_table
from groupwise.sweeps.cells import Cell, read_sweep
from groupwise.sweeps.reproduce import LOSS, POINTS
from trust.faults.process import SEEDED, complete, result_of, same, start, stop_after, wait_for
from trust.models.rows import EXACT
from trust.page import rows_of

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "results" / "trust" / "goldens.json"
CLOSE = 1e-3
"""The relative tolerance of noise multipliers and epsilons."""
SAME, MOVED, DIFFERENT = "same", "moved", "different"
MAY_MOVE = ("runs", "private")
"""Parts with bits and metrics, where other bits with close metrics count as moved."""
Value = float | str
Values = dict[str, Value]
"""The frozen values of a part, by name."""


@functools.cache
def committed_rows() -> tuple[Row, ...]:
    """The rows of runs in results/measured."""
    return tuple(
        row
        for path in sorted((ROOT / "results" / "measured").glob("*.csv"))
        for row in read_table(path)
        if row.get("sweep") and "git.sha" in row  # only rows of runs; tables of curves, norms and texts have no commit
    )


@functools.cache
def _cells(sweep: str, scale: str) -> dict[tuple[str, str], Cell]:
    cells = read_sweep(ROOT / "sweeps" / f"{sweep}.yaml").cells(scale)
    return {(cell.name, str(cell.seed)): cell for cell in cells}


@functools.cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    return compose_run(list(overrides), ROOT / "conf", typed=False)


def hashes() -> Values:
    """The current hash of each row's configuration, with the hash in the row if that differs.

    A row is left out if its sweep or cell no longer exists, or does not compose.
    """
    register()
    found: Values = {}
    for row in committed_rows():
        name = f"{row['sweep']} scale={row['scale']} {row['cell']} seed={row['seed']}"
        try:
            cell = _cells(row["sweep"], row["scale"])[row["cell"], row["seed"]]
            without_seed = tuple(each for each in cell.overrides if not each.startswith("seed="))
            digest = config_hash(replace(_composed(without_seed), seed=cell.seed))
        except (UserError, KeyError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        found[name] = digest[:12] + ("" if digest == row["hash"] else f", where the row has {row['hash'][:12]}")
    return found


PLANNED: dict[str, Callable[[str], Any]] = {
    "dataset_size": int, "expected_batch_size": float, "steps": int, "delta": float, "epsilon": float,
    "num_groups": int, "quantile_budget": float, "sampling": str, "accountant": str,
}  # fmt: skip
"""Arguments of `make_plan` that are columns `plan.<name>` of a row."""


def noise() -> Values:
    """The current noise multiplier of each plan in the committed rows, with that in the row if it differs."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for row in committed_rows():
        if row["plan.noise_multiplier"] not in ("", "0.0"):
            plan = tuple(row[f"plan.{name}"] for name in PLANNED)
            rows.setdefault(plan, []).append(float(row["plan.noise_multiplier"]))
    found: Values = {}
    for plan, of_rows in rows.items():
        named = dict(zip(PLANNED, plan, strict=True))
        sigma = make_plan(**{name: PLANNED[name](text) for name, text in named.items()}).noise_multiplier
        other = [own for own in of_rows if not math.isclose(own, sigma, rel_tol=CLOSE)]
        name = " ".join(f"{name}={text}" for name, text in named.items())
        found[name] = f"{sigma:.6g}, where a row has {other[0]:.6g}" if other else sigma
    return found


PLANS: dict[str, tuple[float, ...]] = {
    "CIFAR-10 flat": (50_000, 4096, 3662, 1e-5, 1.0, 1, 0.0),
    "CIFAR-10 fixed": (50_000, 4096, 3662, 1e-5, 3.0, 53, 0.0),
    "CIFAR-10 adaptive": (50_000, 4096, 3662, 1e-5, 5.0, 53, 0.01),
    "CIFAR-10 blocks": (50_000, 4096, 3662, 1e-5, 8.0, 14, 0.01),
    "SST-2 flat": (67_349, 1024, 1315, 67_349**-1.1, 3.0, 1, 0.0),
    "SST-2 adaptive": (67_349, 1024, 1315, 67_349**-1.1, 8.0, 60, 0.1),
    "SST-2, 3 epochs": (67_349, 1024, 197, 67_349**-1.1, 3.0, 60, 0.1),
    "SST-2, 30 epochs": (67_349, 1024, 1973, 67_349**-1.1, 8.0, 60, 0.2),
    "QNLI adaptive": (104_743, 1593, 1315, 104_743**-1.1, 3.0, 60, 0.1),
    "QQP adaptive": (363_846, 5532, 1315, 363_846**-1.1, 8.0, 60, 0.1),
    "MNLI flat": (392_702, 5971, 1315, 392_702**-1.1, 3.0, 1, 0.0),
    "E2E flat": (42_061, 1000, 421, 8e-6, 3.0, 1, 0.0),
    "E2E adaptive": (42_061, 1000, 421, 8e-6, 8.0, 50, 0.01),
    "DART adaptive": (62_659, 1500, 627, 1e-5, 8.0, 50, 0.01),
    "SAMSum per device": (14_732, 256, 288, 14_732**-1.1, 0.25, 16, 0.0),
    "SAMSum adaptive": (14_732, 256, 288, 14_732**-1.1, 4.0, 16, 0.01),
    "one step": (1000, 100, 1, 1e-4, 8.0, 2, 0.2),
    "one step of all examples": (1000, 1000, 1, 1e-5, 1.0, 1, 0.0),
    "four steps": (256, 32, 4, 1e-5, 8.0, 21, 0.01),
    "a small set, many steps": (2000, 30, 5000, 2000**-1.1, 2.0, 7, 0.05),
}
"""N, B, T, delta, epsilon, K and r (the order of `PLANNED`): cells of the paper, then small ones."""


def plans() -> Values:
    """All noise multipliers of `PLANS`, and the epsilons after a quarter, half and all of the steps, by PRV and RDP."""
    found: Values = {}
    for name, numbers in PLANS.items():
        arguments: dict[str, Any] = dict(zip(PLANNED, numbers, strict=False))
        plan = make_plan(**arguments)
        found[f"{name}: sigma"] = plan.noise_multiplier
        found[f"{name}: sigma_b"] = plan.count_noise_multiplier
        found[f"{name}: sigma_new"] = plan.gradient_noise_multiplier
        for executed in sorted({max(1, plan.steps // 4), max(1, plan.steps // 2), plan.steps}):
            spent = plan.spent(executed)
            found[f"{name}: PRV, {executed} steps"] = spent.prv.upper
            found[f"{name}: RDP, {executed} steps"] = spent.rdp
    return found


ALL_RUNS = ("scale=smoke", "train.matmul=torch", "data.public=true", "train.steps=24", "eval.batch_size=64")
FORMULA = "clip.formula=materialize"
"""One norm formula for all sizes, as the choice of the formula is not frozen."""
IMAGES = ("task=cifar", "data.train_limit=null", "train.batch_size=256", "train.microbatch=64", "eval.train_limit=256")
SST2 = ("task=sst2", FORMULA, "data.train_limit=null", "train.microbatch=64", "optim.learning_rate=0.04")
TEXTS = (FORMULA, "train.steps=12", "train.microbatch=8")
RUNS: dict[str, tuple[str, ...]] = {
    "digits flat": (*IMAGES, FORMULA, "clip=flat"),
    "digits ghost": (*IMAGES, FORMULA, "clip=ghost", "optim=adam", "optim.learning_rate=0.01"),
    "digits fixed_layer": (*IMAGES, FORMULA, "clip=fixed_layer", "optim.momentum=0.9", "optim.learning_rate=1"),
    "digits adaptive_layer": (*IMAGES, FORMULA, "clip=adaptive_layer", "noise=weighted"),
    "digits adaptive_flat": (*IMAGES, FORMULA, "clip=adaptive_flat"),
    "digits none": (*IMAGES, "clip=none", "optim.learning_rate=0.5"),
    "sst2 adaptive_block": (*SST2, "clip=adaptive_block", "noise=equal_budget"),
    "sst2 adaptive_layer": (*SST2, "clip=adaptive_layer"),
    "e2e flat": (*TEXTS, "task=e2e", "clip=flat"),
    "e2e adaptive_layer": (*TEXTS, "task=e2e", "clip=adaptive_layer"),
    "samsum LoRA adaptive_layer": (*TEXTS, "task=samsum", "clip=adaptive_layer"),
    "samsum pipeline per_device": (*TEXTS, "task=samsum_pipeline", "clip=per_device"),
}
"""Runs on data of installed packages or synthetic data. The digits learn enough for their metrics to be meaningful."""


def runs() -> Values:
    """Weights and thresholds, epsilon and metrics of each of `RUNS`; a run that fails is left out."""
    found: Values = {}
    for number, (name, overrides) in enumerate(RUNS.items()):
        with tempfile.TemporaryDirectory() as folder:
            process = complete(Path(folder) / str(number), *ALL_RUNS, *overrides, small=())
            if process.code:
                print(f"{name}: {process.errors.strip()}", file=sys.stderr)
                continue
            ended = result_of(Path(folder) / str(number))
        found[f"{name}: weights"] = ended["weights"]
        found[f"{name}: thresholds"] = hashlib.sha256(json.dumps(ended["thresholds"]).encode()).hexdigest()
        found[f"{name}: epsilon"] = ended["spent"]["epsilon"]  # the text "inf" without noise
        metrics = {key: value for key, value in ended["metrics"][-1].items() if key.startswith(METRICS)}
        found |= {f"{name}: {key}": value for key, value in metrics.items() if not key.endswith("perplexity")}
    return found


class Decoder(nn.Module):
    """One transformer block that classifies a sequence of ten tokens into three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.queries_keys_values, self.head = nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, 10) -> logits (B, 3)."""
        embedded = self.embedding(tokens)
        queries, keys, values = self.queries_keys_values(self.norm(embedded)).chunk(3, dim=-1)
        weights = torch.softmax(queries @ keys.transpose(1, 2) / 4, dim=-1)
        return self.head((embedded + weights @ values).mean(1))


def train_privately(model: nn.Module, data: TensorDataset, clip: str) -> None:
    """Five steps of a custom training loop with `make_private`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels, reduction="none")

    private = groupwise.make_private(
        model, optimizer, data, losses, noise_multiplier=1.0, delta=1e-5, steps=5, batch_size=64, microbatch=16,
        clip=clip, formula="materialize", noise_source=NoiseSource.from_seed(0),
    )  # fmt: skip
    for _ in private.steps():
        pass
    private.detach()


def private() -> Values:
    """Weights and mean loss of three models after `train_privately`, each with another clipping mode."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, tokens, labels = torch.randn(256, 1, 8, 8), torch.randint(20, (256, 10)), torch.randint(3, (256,))
    convolutions = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    models = {
        "MLP flat": (nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3)), images, "flat"),
        "CNN adaptive_layer": (nn.Sequential(*convolutions), images, "adaptive_layer"),
        "transformer ghost": (Decoder(), tokens, "ghost"),
    }
    found: Values = {}
    for name, (model, inputs, clip) in models.items():
        train_privately(model, TensorDataset(inputs, labels), clip)
        weights = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(model.state_dict().items()))
        found[f"{name}: weights"] = hashlib.sha256(weights).hexdigest()
        with torch.no_grad():
            found[f"{name}: loss"] = float(F.cross_entropy(model(inputs), labels))
    return found


def architectures() -> Values:
    """The verdict on each architecture in each mode, from results/trust/models.csv."""
    rows = rows_of("models", ROOT / "results" / "trust")
    return {f"{row['family']}: {row['architecture']}, {row['mode']}": row["status"] for row in rows}


def resumption() -> Values:
    """Whether a run that is killed after ten steps and resumed ends with the results of the undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, killed = Path(folder) / "undisturbed", Path(folder) / "killed"
        complete(undisturbed, *SEEDED)
        process = start(killed, *SEEDED, before=stop_after(10))
        stopped = wait_for(process, process.is_stopped) and process.send(signal.SIGKILL)
        process.wait()
        complete(killed, *SEEDED)
        good = stopped and same(killed, result_of(undisturbed))  # prints differences on stderr
    return {"killed and resumed": "same bits" if good else "other bits"}


PARTS: dict[str, Callable[[], Values]] = {
    part.__name__: part for part in (hashes, noise, plans, runs, private, architectures, resumption)
}


def judge(part: str, name: str, then: Value, now: Value | None) -> str:
    """`SAME`, `MOVED` or `DIFFERENT`; `now` is None where it is missing."""
    if then == now or (part == "architectures" and now == EXACT):
        return SAME
    strict = part not in MAY_MOVE or name.endswith("epsilon")
    if isinstance(then, float) and isinstance(now, float):
        if strict:
            return SAME if math.isclose(then, now, rel_tol=CLOSE) else DIFFERENT
        return MOVED if abs(now - then) <= (LOSS if name.endswith(("loss", "nll")) else POINTS) else DIFFERENT
    return MOVED if not strict and type(now) is type(then) else DIFFERENT


def compare(part: str, frozen: Mapping[str, Value], now: Values) -> tuple[str, list[tuple[str, str]]]:
    """A summary (number of values and worst difference), and (verdict, sentence) of each value that is not the same.

    The worst difference is relative, but absolute for metrics.
    """
    worst, found = 0.0, list[tuple[str, str]]()
    for name, then in frozen.items():
        new = now.get(name)
        if isinstance(then, float) and isinstance(new, float) and then != new:
            worst = max(worst, abs(new - then) / (1.0 if part in MAY_MOVE else abs(then) or 1.0))
        if (verdict := judge(part, name, then, new)) != SAME:
            found.append((verdict, f"{name}: {then} frozen, {'missing' if new is None else new} now"))
    added = len(now.keys() - frozen.keys())
    return f"{len(frozen)} compared, {added} not frozen, worst difference {worst:.2g}", found


def machine() -> dict[str, str]:
    """The software and hardware that the bits of a run depend on."""
    return {"torch": torch.__version__, "numpy": np.__version__, "cpu": hardware("cpu")}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if anything differs, 2 for a wrong option."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m trust.goldens", description=__doc__, formatter_class=shape)
    parser.add_argument("words", nargs="*", metavar="freeze | PART", help=f"freeze, and any of: {', '.join(PARTS)}")
    parser.add_argument("--allow-moved", action="store_true", help="accept other bits if the metrics are close")
    options = parser.parse_args(arguments)
    chosen = [word for word in options.words if word != "freeze"] or list(PARTS)
    if wrong := [word for word in chosen if word not in PARTS]:
        raise unknown("part", wrong[0], [*PARTS, "freeze"])
    file = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    freeze, bad = "freeze" in options.words, 0
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, GROUPWISE_CACHE=cache):  # nothing cached
        for part in chosen:
            began = time.monotonic()
            now = PARTS[part]()
            took = f"({time.monotonic() - began:.0f} s)"
            if freeze:
                failed = part == "runs" and set(RUNS) - {name.partition(":")[0] for name in now}
                if failed or "other bits" in now.values():
                    print(f"error: {part}: a run failed or has other bits, so nothing is frozen.", file=sys.stderr)
                    return 1
                kept = file.get(part, {}).keys() - now.keys()
                file |= {part: file.get(part, {}) | now, "machine": machine()}
                print(f"{part}: {len(now)} frozen, {len(kept)} kept that were not measured now {took}", flush=True)
                continue
            if part not in file:
                raise UserError(f"{RESULT} has no {part}: write it by python -m trust.goldens freeze {part}.")
            summary, found = compare(part, file[part], now)
            print(f"{part}: {summary}, {len(found)} not the same {took}", flush=True)
            for verdict, sentence in found:
                print(f"  {verdict}: {sentence}")
            if any(verdict == MOVED for verdict, _ in found) and machine() != file["machine"]:
                print(f"  frozen with {file['machine']}, and this is {machine()}: bits may differ")
            bad += sum(verdict == DIFFERENT or not options.allow_moved for verdict, _ in found)
    if freeze:
        write_text(RESULT, json.dumps(file, indent=1, ensure_ascii=False) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
