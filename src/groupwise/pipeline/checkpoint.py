"""Saves checkpoints and weights of a pipeline, a file for each stage; all processes see one file system.

`checkpoint.pt` names a folder with every stage's file and is written last: killed at any moment, a run finds the last
complete checkpoint, and the one before it. Weights are kept under the whole model's names, so any number of stages can
read them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.training.checkpoint import load_checkpoint, previous, save_checkpoint
from groupwise.training.ranks import Alone, Ranks

LARGEST = 8 << 30
"""Bytes of a model that is also written as one file."""


def save(path: Path, own: dict[str, Any], common: dict[str, Any], ranks: Alone | Ranks) -> None:
    """Write a checkpoint; all processes call it together, and the stages of the first replica write.

    Args:
        path: of checkpoint.pt; the stages' files go to a folder beside it, which it names.
        own: the stage's state, the same in every replica.
        common: what is the same on all stages; the main process's is kept, and must have "step".

    Raises:
        UserError: on every process, when any cannot write; the checkpoint before it stays as it was.
    """
    folder = path.with_name(f"{path.stem}-{ranks.broadcast(common['step'])}")
    problem = None
    if ranks.replica == 0:
        mine = {name: value for name, value in own.items() if name not in common}
        problem = _tried(_write, folder / _file(ranks.stage), mine)
    _agree(problem, ranks)
    if ranks.main:
        state = {**common, "folder": folder.name, "stages": ranks.stages}
        problem = _tried(save_checkpoint, path, state, previous(path))
    _agree(problem, ranks)
    if ranks.main:
        _remove_others(path)


def load(path: Path, ranks: Alone | Ranks, device: torch.device) -> dict[str, Any]:
    """The stage's own state and what is common, from checkpoint.pt (`path`) and the stage's file.

    Raises:
        UserError: one of the files is gone or altered; another number of stages wrote them.
    """
    state = load_checkpoint(path, device)
    if state["stages"] != ranks.stages:
        raise UserError(
            f"{path} is of {state['stages']} stages, not {ranks.stages}: give pipeline.stages={state['stages']}, or "
            "start afresh with overwrite=true."
        )
    if not re.fullmatch(r"\w+-\d+", str(state["folder"])):
        raise UserError(
            f"{path} names {state['folder']}, which is no folder of a checkpoint: start afresh with overwrite=true."
        )
    return {**state, **load_checkpoint(path.with_name(state["folder"]) / _file(ranks.stage), device)}


def save_weights(path: Path, names: Mapping[str, str], state: Mapping[str, Tensor], ranks: Alone | Ranks) -> None:
    """Write model-<stage>.pt beside `path` and, unless the model is larger than `LARGEST`, the whole model to `path`.

    All processes call it together.

    Args:
        path: of model.pt.
        names: of the stage → of the whole model.
        state: the stage's own state dict, the same in every replica.

    Raises:
        UserError: on every process, when any cannot write.
    """
    weights = {names[name]: tensor for name, tensor in state.items()}
    sizes = ranks.gather(sum(tensor.nbytes for tensor in weights.values()))
    problem = None
    if ranks.replica == 0:
        problem = _tried(save_checkpoint, _shard(path, ranks.stage), weights)
    _agree(problem, ranks)
    if ranks.main and sum(sizes[: ranks.stages]) <= LARGEST:
        problem = _tried(_merge, path, ranks.stages)
    _agree(problem, ranks)


def read_weights(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights that `save_weights` wrote, for a stage of any cut of the same model (or for all of it).

    Args:
        path: of model.pt, whether that is there or the stages' files alone.
        names: of the stage → of the whole model, as `Stage.names` gives them.

    Returns:
        What the stage's `load_state_dict` takes.

    Raises:
        UserError: nothing there, or weights that the stage needs are missing.
    """
    files = [path] if path.is_file() else sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))
    wanted: dict[str, list[str]] = {}
    for own, whole in names.items():
        wanted.setdefault(whole, []).append(own)
    found: dict[str, Tensor] = {}
    for file in files:
        found |= {own: tensor for whole, tensor in load_checkpoint(file).items() for own in wanted.get(whole, ())}
    if missing := sorted(names.keys() - found.keys()):
        raise UserError(f"{path} has no {names[missing[0]]}: give the weights of the same model.")
    return found


def _file(stage: int) -> str:
    return f"stage-{stage}.pt"


def _shard(path: Path, stage: int) -> Path:
    return path.with_name(f"{path.stem}-{stage}{path.suffix}")


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    save_checkpoint(path, state)


def _merge(path: Path, stages: int) -> None:
    whole: dict[str, Any] = {}
    for stage in range(stages):
        whole |= load_checkpoint(_shard(path, stage))
    save_checkpoint(path, whole)


def _remove_others(path: Path) -> None:
    """Remove the folders that neither the last checkpoint nor the one before it names."""
    kept = {load_checkpoint(file)["folder"] for file in (path, previous(path)) if file.is_file()}
    for folder in path.parent.glob(f"{path.stem}-*"):
        if folder.name not in kept and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def _tried(write: Callable[..., None], *args: Any) -> str | None:
    """What the user can fix, if that went wrong."""
    try:
        write(*args)
    except OSError as error:
        return f"{args[0]} cannot be written ({error}): make room, or change paths.results."
    except UserError as error:
        return str(error)
    return None


def _agree(problem: str | None, ranks: Alone | Ranks) -> None:
    """Wait for all, and raise on each what any of them met."""
    if found := next(filter(None, ranks.gather(problem)), None):
        raise UserError(found)
