"""Saves checkpoints and weights of a pipeline, one file per stage, on a file system that all processes share.

`checkpoint.pt` names the folder with the files of all stages. It is written last, so there is always a complete
checkpoint, even if a run is killed. Weights are saved under the whole model's names, so any number of stages can read
them.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import UserError
from groupwise.training.checkpoint import load_checkpoint, previous, save_checkpoint
from groupwise.training.ranks import Ranks

LARGEST = 8 << 30
"""The largest model, in bytes, that is also written as one file."""


def save(path: Path, own: dict[str, Any], common: dict[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint; all processes call it together, and the stages of the first replica write.

    Args:
        path: of checkpoint.pt; the stages' files go to a folder beside it, which it names.
        own: the stage's state, the same in every replica.
        common: the state that all stages share, with the key "step"; that of the main process is written.

    Raises:
        UserError: on every process, if any of them cannot write; the previous checkpoint is kept.
    """
    folder = path.with_name(f"{path.stem}-{ranks.broadcast(common['step'])}")
    mine = {name: value for name, value in own.items() if name not in common}
    _together(ranks, ranks.replica == 0, _write, folder / f"stage-{ranks.stage}.pt", mine)
    state = {**common, "folder": folder.name, "stages": ranks.stages}
    _together(ranks, ranks.main, save_checkpoint, path, state, previous(path))
    if ranks.main:
        _remove_others(path)


def load(path: Path, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """The stage's own state and the common state, from checkpoint.pt (`path`) and the stage's file.

    Raises:
        UserError: a file is missing or damaged, or a run with another number of stages wrote them.
    """
    state = load_checkpoint(path, device)
    if state["stages"] != ranks.stages:
        raise UserError(
            f"{path} was written by {state['stages']} stages, not {ranks.stages}: give "
            f"pipeline.stages={state['stages']}, or start afresh with overwrite=true."
        )
    if not re.fullmatch(r"\w+-\d+", str(state["folder"])):
        raise UserError(
            f"{path} names {state['folder']}, which is not a checkpoint's folder: start afresh with overwrite=true."
        )
    return {**state, **load_checkpoint(path.with_name(state["folder"]) / f"stage-{ranks.stage}.pt", device)}


def save_weights(path: Path, names: Mapping[str, str], state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write model-<stage>.pt beside `path` and, unless the model is larger than `LARGEST`, the whole model to `path`.

    All processes call it together.

    Args:
        names: name in the stage → name in the whole model.
        state: the stage's own state dict, the same in every replica.

    Raises:
        UserError: on every process, if any of them cannot write.
    """
    weights = {names[name]: tensor for name, tensor in state.items()}
    sizes = ranks.gather(sum(tensor.nbytes for tensor in weights.values()))
    _together(ranks, ranks.replica == 0, save_checkpoint, _shard(path, ranks.stage), weights)
    _together(ranks, ranks.main and sum(sizes[: ranks.stages]) <= LARGEST, _merge, path, ranks.stages)


def read_weights(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The state dict of a stage, or of the whole model, from files of `save_weights` for any number of stages.

    Args:
        path: of model.pt, which may be missing if the stages' files are there.
        names: name in the stage → name in the whole model, from `Stage.names`.

    Raises:
        UserError: there are no files, or weights that the stage needs are missing.
    """
    files = [path] if path.is_file() else sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))
    wanted, found = set(names.values()), dict[str, Tensor]()
    for file in files:
        found |= {whole: tensor for whole, tensor in load_checkpoint(file).items() if whole in wanted}
    if missing := sorted(own for own, whole in names.items() if whole not in found):
        raise UserError(f"{path} has no {names[missing[0]]}: give the weights of the same model.")
    return {own: found[whole] for own, whole in names.items()}


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
    """Remove all folders but those of the last checkpoint and the one before it."""
    kept = {load_checkpoint(file)["folder"] for file in (path, previous(path)) if file.is_file()}
    for folder in path.parent.glob(f"{path.stem}-*"):
        if folder.name not in kept and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def _together(ranks: Ranks, here: bool, write: Callable[..., None], *args: Any) -> None:
    """Write on the processes where `here` is true; all processes wait, and raise the first error."""
    problem = None
    try:
        if here:
            write(*args)
    except OSError as error:
        problem = f"{args[0]} cannot be written ({error}): free space on the disk, or give another folder."
    except UserError as error:
        problem = str(error)
    if found := next(filter(None, ranks.gather(problem)), None):
        raise UserError(found)
