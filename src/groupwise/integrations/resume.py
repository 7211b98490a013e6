"""Saves what a private training needs to resume in transformers' checkpoints, and the key of the noise elsewhere.

The folder of a checkpoint may be published: its `privacy.pt` has the plan, thresholds and steps, but not the key. The
key lies beside ``output_dir``, which some trackers upload whole, in a file that only its owner can read.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from groupwise.atomic import why_unwritable
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.private import Private
from groupwise.training.checkpoint import load_checkpoint, save_checkpoint

STATE = "privacy.pt"


def key_path(folder: Path) -> Path:
    """The file with the key of the run in ``folder``, beside the folder: out -> out.noise_key.pt."""
    whole = folder.resolve()
    return whole.parent / f"{whole.name}.noise_key.pt"


def keep_key(folder: Path, noise: NoiseSource) -> None:
    """Keep the key of a run that writes its checkpoints into ``folder``, before its first release.

    Raises:
        UserError: nothing can be written beside the folder.
    """
    path = key_path(folder)
    if why := why_unwritable(path.parent):
        raise UserError(f"The key of the noise cannot be kept in {path}, beside output_dir ({why}): give another one.")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, {"noise_key": noise.key, "noise_is_secret": noise.is_secret})


def check_new(folder: Path) -> None:
    """Refuse to begin where another run can be resumed.

    Raises:
        UserError: there are its key and a checkpoint.
    """
    if key_path(folder).exists() and any(folder.glob(f"checkpoint-*/{STATE}")):
        raise UserError(
            f"{folder} holds a private training that did not end, and a new one would spend another epsilon: "
            "train(resume_from_checkpoint=True) resumes it, or give another output_dir."
        )


def find(folder: Path, asked: str | os.PathLike[str] | bool) -> Path:
    """The checkpoint to resume from: ``asked``, or for True the last that was written to its end.

    Raises:
        UserError: there is none, or it lies elsewhere, where its key would stay.
    """
    if isinstance(asked, str | os.PathLike):
        candidates = [Path(asked)]
        if (home := candidates[0].absolute().parent).resolve() != folder.resolve():
            raise UserError(f"{asked} lies outside of output_dir={str(folder)!r}: give output_dir={str(home)!r}.")
    else:
        candidates = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    for candidate in candidates:
        if _is_whole(candidate):
            return candidate
        if candidate is not candidates[-1]:
            warnings.warn(f"{candidate} was not written to its end: resuming from the one before it.", stacklevel=2)
    raise UserError(
        f"{folder if isinstance(asked, bool) else asked} has no whole checkpoint of a private training with its "
        "optimiser: give one that PrivateTrainer wrote without save_only_model, or start a new training."
    )


def _is_whole(checkpoint: Path) -> bool:
    """Whether all of it is there: transformers writes the trainer's state last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return (checkpoint / STATE).exists()


def save(folder: Path, private: Private, settings: dict[str, str]) -> None:
    """Write ``privacy.pt`` into a checkpoint's folder, where weights and optimiser are."""
    state = private.state_dict()
    kept = {name: value for name, value in state.items() if name not in ("noise_key", "model", "optimizer")}
    save_checkpoint(folder / STATE, {**kept, "settings": settings})


def read(folder: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Read what `save` wrote, before transformers reads the rest of a checkpoint.

    Raises:
        UserError: under other settings, or damaged.
    """
    saved = load_checkpoint(folder / STATE)
    for name, value in settings.items():
        if saved["settings"].get(name) != value:
            raise UserError(
                f"{name} is {value} and was {saved['settings'].get(name)} when {folder} was written: steps that are "
                "taken again would add the same noise to other gradients, so give the same settings."
            )
    return saved


def load(folder: Path, saved: dict[str, Any], private: Private, steps: int) -> None:
    """Resume after the ``steps`` of a checkpoint, whose weights and optimiser were read already, with its key.

    A replayed step repeats its noise, which is private only if it repeats everything else too. The checksum of the
    state holds weights, optimiser and key to what was saved, as `read` does settings.

    Raises:
        UserError: something is missing, was altered, or is another; nothing is left to train.
    """
    if saved["step"] >= private.plan.steps:
        raise UserError(
            f"{folder} was written after the last step, so nothing is left to train: from_pretrained loads it."
        )
    if saved["step"] != steps:
        raise UserError(f"The Trainer's steps in {folder} are not those of its {STATE}: give another checkpoint.")
    path = key_path(folder.absolute().parent)
    if not path.exists():
        raise UserError(
            f"The key of the noise is not at {path}: bring it there if the run was killed or its folder moved; one "
            "that is done cannot be resumed."
        )
    core = private.core
    own = {"model": core.model.state_dict(), "optimizer": core.optimizer.state_dict()}
    try:
        private.load_state_dict({**saved, **load_checkpoint(path), **own})
    except UserError as error:
        raise UserError(f"{folder} cannot be resumed with {path}, so give another checkpoint: {error}") from error
