"""Runs one configuration and returns its result row. Everything is checked before anything is written."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupwise.build import build_stage_task, build_trainer
from groupwise.clipping import ClippingEngine, explain, matmul
from groupwise.clipping.precision import full_float32
from groupwise.config.identity import load_config
from groupwise.config.schema import ModelConfig, RunConfig
from groupwise.errors import UserError, environment_errors, message, reason
from groupwise.models.hub import find_source
from groupwise.pipeline import checkpoint
from groupwise.pipeline.stage import Stage
from groupwise.privacy import PrivacyPlan
from groupwise.privacy.plan import folded
from groupwise.rows import METRICS
from groupwise.tasks import make_task
from groupwise.training.checkpoint import load_checkpoint, load_newest
from groupwise.training.earlier_runs import EXPORT, counted, earlier_runs, sentence
from groupwise.training.from_config import make_engine, plan_of
from groupwise.training.graphs import recorder_of
from groupwise.training.memory import keep_freed_blocks, oom_as_user_error
from groupwise.training.provenance import reset_peak_memory, resources
from groupwise.training.ranks import Ranks
from groupwise.training.record import RunRecord, neighbours_of, provenance_of
from groupwise.training.reports import result_lines
from groupwise.training.step import Trainer
from groupwise.training.task import Task
from groupwise.training.train import train


@oom_as_user_error()
@environment_errors()
def run(config: RunConfig, ranks: Ranks | None = None) -> dict[str, Any]:
    """Train one configuration, or resume it from its last checkpoint; returns its result row.

    Nothing is written before data, model, clipping and plan have been checked. All processes of the run call this, with
    their `ranks`; None stands for a single process. Raises `UserError` for any error that the user can fix.
    """
    ranks = ranks or Ranks()
    record = RunRecord.open(config)
    finished, resumable = ranks.broadcast((record.finished, record.resumable and not config.explain))
    if finished and not config.explain:
        if ranks.main:
            record.mark_done()
        row = record.read("result")
        print(f"Already done: {record.folder} (overwrite=true runs it again)", *result_lines(row), sep="\n")
        if ranks.main and config.export is not None and not (Path(config.export).expanduser() / EXPORT).is_file():
            _export_finished(config, record, row)
        return row
    if not resumable:
        require_gpu_for_the_paper(config)
    device = choose_device(config.train.device)
    if config.train.cuda_graph:
        recorder_of(device)
    if device.type == "cpu":
        keep_freed_blocks()
    reset_peak_memory(device)
    with full_float32(), _deterministic(device) if config.train.deterministic else nullcontext():
        return _run(config, record, device, ranks, resumable)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms of torch, cuDNN and cuBLAS on a GPU, so that a run repeats bit for bit on its model.

    This is slower. Torch raises RuntimeError for an operation that has none. Use it before the first product, which
    reads CUBLAS_WORKSPACE_CONFIG. Does nothing on a CPU.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS add in a fixed order
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _run(config: RunConfig, record: RunRecord, device: torch.device, ranks: Ranks, resumable: bool) -> dict[str, Any]:
    matmul.use(config.train.matmul)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    task = build_stage_task(config, ranks, device) if ranks.stages > 1 else make_task(config, device)
    if config.model.weights is not None:
        refuse_other_tokens(config.model, Path(config.model.weights).expanduser())
        start_from(task.model, config.model.weights)
    described = task.describe_data()
    if "generated" in described:
        print(folded(f"Data: {described['source']}; {described['generated']}."))
    if "public_text" in described:
        print(folded(f"Public in-domain text: {described['public_text']}."))
    _check_exports(config, task)
    if config.eval.shots is not None:
        return evaluate_in_context(config, record, task, device)
    engine = make_engine(task.model, config.clip)
    plan = plan_run(config, task.train_size, _groups(config, engine, ranks))
    print(plan.statement())
    source = None if config.model.fresh else config.model.source
    files = () if config.data.public else described.get("sha256", {}).values()
    earlier = earlier_runs(config.model.weights, None if source is None else find_source(source), files)
    if plan.noise_multiplier > 0:
        if earlier:
            print(folded(f"  {sentence(counted(earlier))}"))
        if config.data.train_limit or config.data.holdout:
            print(folded(f"  Neighbouring data sets differ by {neighbours_of(config)}."))
        if config.data.public:
            again = "the noise key is derived from the seed, so the run can be reproduced. Not a private release."
            print(folded(f"  Public data: {again}"))
        if config.debug.noise_seed is not None:
            known = "debug.noise_seed makes the noise predictable, which is for tests only."
            print(folded(f"  NOT PRIVATE: {known}"))
    file, state = None, None
    if resumable:  # the newest checkpoint that all processes can read
        load = partial(load_checkpoint, device=device)
        if ranks.stages > 1:
            load = partial(checkpoint.load, ranks=ranks, device=device)
        file, state = load_newest(record.checkpoint, load, ranks)
    trainer = build_trainer(config, task, engine, plan, device, ranks, state)
    if config.explain:
        return _explain(trainer)
    if state is not None and file is not None:
        try:
            trainer.load_state_dict(state)
        except UserError:
            raise
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{file} was altered ({reason(error)}): start afresh with overwrite=true.") from error
        state = {name: state[name] for name in state.keys() - {"model", "optimizer"}}  # the trainer has these now
        print(f"Resuming after step {trainer.private.executed} of {plan.steps}, from {file.name}.")
    if ranks.main:
        record.begin(file)
    ranks.barrier()  # no process writes to the folder before the main process has made and cleared it
    try:
        return train(record, trainer, state or {}, earlier)
    finally:
        record.close()
        if trainer.private.engine is not None:
            trainer.private.engine.detach()


def _export_finished(config: RunConfig, record: RunRecord, row: dict[str, Any]) -> None:
    """Export the model of a finished run to `export=FOLDER`, as at the end of a run."""
    task = make_task(config, torch.device("cpu"))
    _check_exports(config, task)
    start_from(task.model, str(record.folder))
    metrics = {key: value for key, value in row.items() if key.startswith(METRICS)}
    task.export(Path(str(config.export)).expanduser(), provenance_of(record, task.describe_data(), metrics))
    print(f"Exported: {config.export}")


def _check_exports(config: RunConfig, task: Task) -> None:
    if config.export is not None and not task.exports:
        raise UserError(
            f"export works for language models only: for task={config.task} use model.pt in the run's folder."
        )


def _explain(trainer: Trainer) -> dict[str, Any]:
    """Print how norms are computed for one microbatch of the size that training will use."""
    if trainer.private.engine is None:
        print("clip=none clips nothing, so there are no norms to explain.")
        return {}
    size = min(trainer.private.sums.size, trainer.task.train_size)
    trainer.private.engine.clip(trainer.task.losses_of, range(size))
    print(f"How norms are computed, for microbatches of {size} examples:\n{explain(trainer.private.engine)}")
    trainer.private.engine.detach()
    return {}


def require_gpu_for_the_paper(config: RunConfig) -> None:
    """Refuse a new run at the paper's scale without a GPU, unless train.device=cpu or a shorter run was asked for."""
    small = config.scale != "paper" or config.train.steps is not None or config.eval.shots is not None or config.explain
    small = small or bool(config.own_task)  # a task that is not in the paper
    if small or config.train.device != "auto" or torch.cuda.is_available():
        return
    raise UserError(
        f"scale=paper trains the paper's cell, {config.train.epochs:g} epochs of {config.model.name} on "
        f"task={config.task}, which takes days on a CPU, and torch sees no GPU: give scale=mini or scale=demo, which "
        "take minutes, or train.device=cpu to train on the CPU anyway."
    )


def choose_device(name: str) -> torch.device:
    """The named device; "auto" is CUDA if there is a GPU."""
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UserError(f"train.device={name} was given, but torch sees no GPU: use train.device=cpu, or auto.")
    return torch.device("cuda", torch.cuda.current_device())


def _groups(config: RunConfig, engine: ClippingEngine | None, ranks: Ranks) -> int | None:
    """K, the number of groups over all stages; 1 for flat clipping, None without clipping."""
    if engine is None:
        return None
    if config.clip.grouping == "flat":
        return 1
    return sum(ranks.gather(len(engine.groups))[: ranks.stages])


def plan_run(config: RunConfig, train_size: int, groups: int | None) -> PrivacyPlan:
    """The privacy plan, with K = `groups`; None means no clipping, so no guarantee."""
    privacy = config.privacy
    epsilon, multiplier = privacy.epsilon, privacy.noise_multiplier
    if groups is None:
        epsilon, multiplier = float("inf"), None
    return plan_of(
        config.clip,
        dataset_size=train_size,
        batch_size=_expected_batch_size(config, train_size),
        epochs=config.train.epochs,
        steps=config.train.steps,
        delta=privacy.delta,
        epsilon=epsilon if multiplier is None else None,
        noise_multiplier=multiplier,
        num_groups=groups or 1,
        sampling=privacy.sampling,
        accountant=privacy.accountant,
    )


def _expected_batch_size(config: RunConfig, train_size: int) -> int:
    """B as configured, or ρN."""
    if config.train.sample_rate is not None:
        return max(1, round(config.train.sample_rate * train_size))
    batch_size = config.train.batch_size
    assert batch_size is not None, "validate() asks for one of the two"
    if batch_size > train_size:
        raise UserError(
            f"train.batch_size={batch_size} is larger than the training set ({train_size} examples): lower it."
        )
    return batch_size


def evaluate_in_context(config: RunConfig, record: RunRecord, task: Task, device: torch.device) -> dict[str, Any]:
    """Evaluate without training, with `eval.shots` examples in the prompt; writes a record and returns its row."""
    assert config.eval.shots is not None
    shots, prompt_set = config.eval.shots, config.eval.prompt_set
    print(f"In context: {shots} training examples in the prompt (set {prompt_set}), no training.")
    if shots:
        print("  NOT PRIVATE: the prompt contains training examples.")
    began = time.monotonic()
    found = task.evaluate_in_context(shots, prompt_set)
    seconds = time.monotonic() - began
    metrics = {f"test/{key}": value for key, value in found.items()}
    record.begin()
    try:
        record.write_data(task.describe_data())
        record.write_outputs(task.outputs())
        row = record.finish(metrics, plan={"steps": 0, "private": False}, system=resources(device, seconds))
    finally:
        record.close()
    print(*result_lines(row), f"Record: {record.folder}", sep="\n")
    return row


def refuse_other_tokens(model: ModelConfig, weights: Path) -> None:
    """Refuse weights of a run with another tokeniser, where the tokenisers of both are in folders."""
    if (record := (weights if weights.is_dir() else weights.parent) / "config.yaml").is_file():
        names = [str(each.tokenizer or each.source) for each in (model, load_config(record).model)]
        files = [Path(find_source(name)) / "tokenizer.json" for name in names]
        if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
            raise UserError(f"model.weights={weights} has other tokens: give model.tokenizer={names[1]}.")


def start_from(model: nn.Module, given: str) -> None:
    """Load `model.weights` into a whole model or into a stage of it, in place.

    `groupwise.training.earlier_runs` adds up their privacy budgets.

    Args:
        model: of the run, before clipping is attached to it.
        given: a finished run's folder, or its model.pt.

    Raises:
        UserError: there are no weights, they are of another model, or they are not finite.
    """
    path = Path(given).expanduser()
    path = path / "model.pt" if path.is_dir() else path
    if not path.is_file() and not list(path.parent.glob(escape(f"{path.stem}-") + "*" + escape(path.suffix))):
        raise UserError(f"model.weights={given} has no model.pt: give the folder of a finished run.")
    weights = checkpoint.read_weights(
        path, model.names if isinstance(model, Stage) else {name: name for name in model.state_dict()}
    )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"model.weights={given} does not fit this model ({message(error)}): give a run of the same model."
        ) from error
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise UserError(f"model.weights={given} has NaN or infinite values in {name}: give other weights.")
    print(f"Weights: {path}")
