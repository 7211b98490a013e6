"""The training loop: steps, checkpoints, metrics and evaluations, and at the end the spent ε and the result row.

All processes of a run execute the loop together. Whether to write a checkpoint or to stop depends on a clock or a
signal, so the processes agree on it once per step, together with the step's metrics. Only the main process writes the
record.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.privacy import PrivacyPlan
from groupwise.privacy.plan import finite_json
from groupwise.training.earlier_runs import Entry, counted, total
from groupwise.training.progress import Progress
from groupwise.training.provenance import resources, usable_cores
from groupwise.training.record import RunRecord, neighbours_of, provenance_of
from groupwise.training.reports import FilesTracker, result_lines
from groupwise.training.step import Trainer

CURVE = 100
"""The number of times that a run logs its adaptive thresholds."""


def train(record: RunRecord, trainer: Trainer, state: dict[str, Any], earlier: Sequence[Entry] = ()) -> dict[str, Any]:
    """Train up to the last step, evaluate, compute the spent ε, and write and close the record.

    SIGINT or SIGTERM raises KeyboardInterrupt after the current step and its checkpoint, but at once during the final
    evaluation.

    Args:
        record: the record of the run; `begin` was called in the main process. The other processes use only its path.
        state: the checkpoint that `trainer` has loaded, with the seconds so far; {} for a new run.
        earlier: the runs that the starting weights come from.

    Returns:
        The result row in the main process, and {} in all others.
    """
    config, headline = record.config, trainer.task.headline
    plan, ranks, start = trainer.private.plan, trainer.private.ranks, trainer.private.executed
    privacy = _begin(record, trainer, state, earlier) if ranks.main else {}
    trackers = [FilesTracker(record, start)] if ranks.main else []
    epoch = plan.dataset_size / plan.expected_batch_size
    every = None if config.eval.every is None else max(1, round(config.eval.every * epoch))
    elapsed = float(state.get("seconds", 0.0))
    evaluating = float(state.get("evaluation_seconds", 0.0))
    began = saved = time.monotonic()
    kept = {step for step in kept_steps(config, plan) if not any(record.folder.glob(f"weights-{step}[.-]*"))}
    kept = ranks.broadcast(kept)  # weights that may be published already are not replaced

    def save() -> None:
        seconds = elapsed + time.monotonic() - began
        trainer.save(record.checkpoint, {"seconds": seconds, "evaluation_seconds": evaluating})

    def keep(step: int) -> None:
        if step in kept:
            trainer.save_model(record.folder / f"weights-{step}.pt")

    def measure(final: bool) -> dict[str, float]:
        """The metrics of the current model, and the seconds of training so far."""
        nonlocal evaluating
        paused = time.monotonic()
        training = elapsed + paused - began - evaluating
        found = evaluate(config, trainer, final)
        evaluating += time.monotonic() - paused
        return {**found, "seconds": training}

    with Progress(plan, start, plan.steps, disable=not ranks.main) as bar, _stop_flag() as stop:
        if start == 0:
            save()  # so that the noise key is on disk before the first release
        keep(start)
        for step in range(start, plan.steps):
            parts = trainer.step(step)
            evaluates = every is not None and step + 1 < plan.steps and (step + 1) % every == 0
            found = measure(config.eval.curve) if evaluates else {}
            moved: dict[str, float] = {}
            if config.clip.policy == "adaptive" and (step + 1) % max(1, plan.steps // CURVE) == 0:
                moved = {f"threshold/{name}": value for name, value in trainer.named_thresholds().items()}
            late = ranks.main and time.monotonic() - saved >= config.train.checkpoint_every
            due, stopping, *totals = ranks.agree(late, len(stop), *parts)
            metrics = trainer.report(totals) | found | moved
            for tracker in trackers:
                tracker.log(step + 1, {**metrics, "epsilon_bound": plan.progress(step + 1)})
            bar.step(step + 1, f"valid {headline} {found[f'valid/{headline}']:.1f}" if found else "")
            last = step + 1 == plan.steps  # the final evaluation may fail
            # The steps before kept weights, which may be published, must never run again.
            if due or stopping or last or step + 1 in kept:
                save()
                saved = time.monotonic()
            keep(step + 1)
            if stopping:
                raise KeyboardInterrupt
        if any(ranks.gather(len(stop))):  # a signal during the last checkpoint
            raise KeyboardInterrupt
    seconds = elapsed + time.monotonic() - began
    throughput = plan.expected_batch_size * plan.steps / max(seconds - evaluating, 1e-9)  # drawn sizes are private
    with _stop_flag(at_once=True):
        final = measure(final=True)
    for tracker in trackers:
        tracker.log(plan.steps, final)
        tracker.finish()
    del final["seconds"]  # the row has the seconds of the whole run
    if ranks.main:
        record.write_outputs(trainer.task.outputs())
    return _close(record, trainer, final, privacy, seconds, throughput)


def _begin(record: RunRecord, trainer: Trainer, state: dict[str, Any], earlier: Sequence[Entry]) -> dict[str, Any]:
    """Write data, privacy and seeds before the first step, and check earlier files; returns the entries on privacy."""
    plan, start, before = trainer.private.plan, trainer.private.executed, counted(earlier)
    replayed = record.replayed(start) if state else 0
    record.write_data(trainer.task.describe_data())
    epsilon, delta = total(before, plan.epsilon, plan.delta)
    privacy = {
        "plan": plan.to_dict(),
        "earlier": list(earlier),
        **({"total": finite_json({"epsilon": epsilon, "delta": delta})} if before else {}),
        "neighbours_differ_by": neighbours_of(record.config),
        "executed_steps": start,
        "replayed_steps": replayed,
        "private": plan.is_private and trainer.private.noise.is_secret and math.isfinite(epsilon),
    }
    record.write("privacy", privacy)  # before `cut_metrics` removes the lines that `replayed` counts
    record.cut_metrics(start)
    seeds = {"seed": record.config.seed, "noise_seed": record.config.debug.noise_seed}
    record.write("seeds", {**seeds, "noise_is_secret": trainer.private.noise.is_secret})
    return privacy


def kept_steps(config: RunConfig, plan: PrivacyPlan) -> set[int]:
    """The steps after which `train.keep` saves the weights; an epoch after the last step is the last step."""
    return {min(plan.steps, round(epoch * plan.dataset_size / plan.expected_batch_size)) for epoch in config.train.keep}


def evaluate(config: RunConfig, trainer: Trainer, final: bool = False) -> dict[str, float]:
    """Metrics on the first split, or on all splits if `final`, and on training data, which are not private."""
    splits, size = trainer.task.splits, config.eval.batch_size
    found: dict[str, float] = {}
    for split in splits if final else splits[:1]:
        found |= {f"{split}/{k}": v for k, v in trainer.evaluate(split, size, final=final).items()}
    train = trainer.evaluate("train", size, config.eval.train_limit)
    return found | {f"nonprivate/train_{k}": v for k, v in train.items()}


def _close(
    record: RunRecord,
    trainer: Trainer,
    final: dict[str, float],
    privacy: dict[str, Any],
    seconds: float,
    throughput: float,
) -> dict[str, Any]:
    """Compute the ε of the released steps, write the result and the weights, and remove the noise key."""
    plan, main = trainer.private.plan, trainer.private.ranks.main
    thresholds, machine = trainer.named_thresholds(), trainer.machine()
    report = plan.spent(trainer.private.executed)
    if report.executed_steps != plan.steps or report.epsilon > plan.epsilon * (1 + 1e-6):
        raise UserError(
            f"The run released {report.executed_steps} of {plan.steps} steps and spent epsilon {report.epsilon:.4f} of "
            f"{plan.epsilon:.4f}: do not use its result."
        )
    if main:
        spent = {**report.to_dict(), "guaranteed": privacy["private"]}
        steps = {"executed_steps": report.executed_steps}
        record.write("privacy", {**privacy, "thresholds": thresholds, "spent": spent, **steps})
    trainer.save_model(record.folder / "model.pt")
    if not main:
        return {}
    if record.config.export is not None:
        provenance = provenance_of(record, trainer.task.describe_data(), final)
        trainer.task.export(Path(record.config.export).expanduser(), provenance)
        print(f"Exported: {record.config.export}")
    said = {name: privacy[name] for name in ("private", "neighbours_differ_by", "replayed_steps")}
    said |= {f"total_{name}": value for name, value in privacy.get("total", {}).items()}
    row = record.finish(
        final,
        plan={**plan.to_dict(), "spent_epsilon": report.to_dict()["epsilon"], **said},
        system={
            **resources(trainer.private.device, seconds),
            "cores": usable_cores(),
            "threads": torch.get_num_threads(),
            "microbatch": trainer.private.sums.size,
            "examples_per_second": throughput,
            **machine,
        },
    )
    print(*result_lines(row), f"Record: {record.folder}", sep="\n")
    return row


@contextmanager
def _stop_flag(at_once: bool = False) -> Iterator[list[int]]:
    """Yield a list that stays empty until SIGINT or SIGTERM arrives, so that the loop can save after its current step.

    A second Ctrl-C raises KeyboardInterrupt at once. A second SIGTERM does not, as a cluster may send several. With
    `at_once` the first signal of either kind does.
    """
    stop: list[int] = []

    def ask(number: int, _: Any) -> None:
        if at_once or number == signal.SIGINT in stop:
            raise KeyboardInterrupt
        stop.append(number)

    here = threading.current_thread() is threading.main_thread()  # only the main thread can set handlers
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM) if here}
    try:
        yield stop
    finally:
        for number, own in before.items():
            signal.signal(number, own)
