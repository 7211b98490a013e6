"""A training session: steps, checkpoints, metrics and evaluations, then the accounts and the result row."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.privacy import PrivacyPlan
from groupwise.training.checkpoint import save_checkpoint
from groupwise.training.identity import stable_config
from groupwise.training.loop import Trainer
from groupwise.training.progress import Progress
from groupwise.training.provenance import resources, usable_cores
from groupwise.training.record import RunRecord
from groupwise.training.task import Task
from groupwise.training.trackers import make_tracker


def train(config: RunConfig, record: RunRecord, trainer: Trainer, start: int, state: dict[str, Any]) -> dict[str, Any]:
    """Train from step `start` to the end, write the record as it goes, evaluate, account and close it.

    Args:
        state: the checkpoint that `trainer` was loaded from; empty for a new run.

    Returns:
        The result row.

    Raises:
        UserError: more was spent than planned, or something cannot be written.
        KeyboardInterrupt: asked to stop (SIGINT or SIGTERM), after a checkpoint at the end of the step.
    """
    plan, noise, headline = trainer.plan, trainer.noise, trainer.task.headline
    private = plan.is_private and noise.is_secret
    replayed = int(state.get("replayed_steps", 0)) + max([row["step"] - start for row in record.metrics()] + [0])
    record.cut_metrics(start)
    record.write_data(trainer.task.describe_data())
    record.write(
        "seeds", {"seed": config.seed, "noise_seed": config.debug.noise_seed, "noise_is_secret": noise.is_secret}
    )
    record.write("privacy", {"plan": plan.to_dict(), "executed_steps": start, "private": private})
    tracker = make_tracker(config, record, start)
    elapsed, examples = float(state.get("seconds", 0.0)), int(state.get("examples", 0))
    began = saved = time.monotonic()

    def save(step: int) -> None:
        seconds = elapsed + time.monotonic() - began
        extra = {"step": step, "replayed_steps": replayed, "seconds": seconds, "examples": examples}
        save_checkpoint(record.checkpoint, {**trainer.state_dict(), **extra})

    with (
        Progress(plan.steps, start=start, epsilon=_spent(plan), target_epsilon=plan.epsilon) as bar,
        _stop_flag() as stop,
    ):
        if start == 0:
            save(0)  # the key of the noise is safe before the first release
        for step in range(start, plan.steps):
            metrics = trainer.step(step)
            drawn = int(metrics["nonprivate/batch_size"])
            examples += drawn
            note = ""
            if _evaluates(config, plan, step + 1):
                metrics |= evaluate(config, trainer)
                note = f"valid {headline} {metrics[f'valid/{headline}']:.1f}"
            tracker.log(step + 1, {**metrics, "epsilon_estimate": plan.progress(step + 1)})
            bar.update(step + 1, drawn, note)
            if time.monotonic() - saved >= config.train.checkpoint_every or stop:
                save(step + 1)
                saved = time.monotonic()
            if stop:
                raise KeyboardInterrupt
        throughput = bar.examples_per_second
    seconds = elapsed + time.monotonic() - began
    final = evaluate(config, trainer, final=True)
    tracker.log(plan.steps, final)
    record.write_outputs(trainer.task.outputs())
    tracker.finish()
    return _close(record, trainer, final, private, replayed, seconds, throughput)


def _spent(plan: PrivacyPlan) -> Any:
    return plan.progress if plan.noise_multiplier > 0 else None


def _evaluates(config: RunConfig, plan: PrivacyPlan, step: int) -> bool:
    """Every `eval.every` epochs, but not at the end, which is evaluated anyway."""
    if config.eval.every is None or step >= plan.steps:
        return False
    between = max(1, round(config.eval.every * plan.dataset_size / plan.expected_batch_size))
    return step % between == 0


def evaluate(config: RunConfig, trainer: Trainer, final: bool = False) -> dict[str, float]:
    """Metrics on all splits (before the end: validation and training); the training set's are no private releases."""
    task, size = trainer.task, config.eval.batch_size
    found: dict[str, float] = {}
    for split in task.splits if final else task.splits[:1]:
        found |= {f"{split}/{k}": v for k, v in task.evaluate(split, size, final=final).items()}
    train = task.evaluate("train", size, config.eval.train_limit)
    return found | {f"nonprivate/train_{k}": v for k, v in train.items()}


def _close(
    record: RunRecord,
    trainer: Trainer,
    final: dict[str, float],
    private: bool,
    replayed: int,
    seconds: float,
    throughput: float,
) -> dict[str, Any]:
    """Account for what was executed, write the result, and leave weights without the noise key behind."""
    plan = trainer.plan
    report = plan.spent(plan.steps)
    if report.epsilon > plan.epsilon * (1 + 1e-6):
        raise UserError(
            f"The run spent epsilon {report.epsilon:.4f}, more than its target {plan.epsilon:.4f}: do not use it."
        )
    thresholds = {} if trainer.thresholds is None else _named_thresholds(trainer)
    spent = {**report.to_dict(), "guaranteed": private}
    privacy = {"spent": spent, "executed_steps": plan.steps, "replayed_steps": replayed, "private": private}
    record.write("privacy", {"plan": plan.to_dict(), "thresholds": thresholds, **privacy})
    save_checkpoint(record.folder / "model.pt", trainer.task.model.state_dict())
    if record.config.export is not None:
        export(record, trainer.task, final)
    row = record.finish(
        final,
        plan={
            **plan.to_dict(),
            "spent_epsilon": spent["epsilon"],
            "private": private,
            "replayed_steps": replayed,
        },
        system=_system(trainer, seconds, throughput),
    )
    record.checkpoint.unlink(missing_ok=True)  # it holds the key of the noise
    stamp = "" if private else " (as published, not a guarantee)" if trainer.noise.is_secret else " (NOT PRIVATE)"
    if plan.noise_multiplier > 0:
        print(f"Spent: epsilon {report.epsilon:.3f} at delta {plan.delta:g} in {plan.steps} steps{stamp}")
    else:
        print("Spent: no noise was added; this model has no privacy guarantee")
    told = "  ".join(f"{key} {value:.2f}" for key, value in final.items() if "loss" not in key and "nll" not in key)
    print(f"{told}  in {seconds:.0f} s\nRecord: {record.folder}")
    return row


def export(record: RunRecord, task: Task, final: dict[str, float]) -> None:
    """Write the model to `export=FOLDER` for other programs, with where it came from."""
    folder = Path(str(record.config.export)).expanduser()
    task.export(
        folder,
        {
            "hash": record.hash,
            "config": stable_config(record.config),
            "git": {key: record.git()[key] for key in ("sha", "dirty")},
            "data": task.describe_data(),
            "metrics": final,
        },
    )
    print(f"Exported: {folder}")


def _named_thresholds(trainer: Trainer) -> dict[str, float]:
    assert trainer.engine is not None and trainer.thresholds is not None
    names = [group.name for group in trainer.engine.groups]
    return dict(zip(names, trainer.thresholds.clip_thresholds.tolist(), strict=True))


def _system(trainer: Trainer, seconds: float, throughput: float) -> dict[str, Any]:
    return {
        **resources(trainer.device, seconds),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "microbatch": trainer.microbatch,
        "examples_per_second": throughput,
    }


@contextmanager
def _stop_flag() -> Iterator[list[int]]:
    """A list that fills up when the process is asked to stop: the loop then saves at the end of its step."""
    stop: list[int] = []

    def ask(number: int, _: Any) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
