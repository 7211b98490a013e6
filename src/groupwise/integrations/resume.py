"""Saves the state of a private training in transformers' checkpoints, and the noise key elsewhere.

The folder of a checkpoint may be published: its `privacy.pt` has the plan, thresholds and steps, but not the key. The
key is in a file beside ``output_dir``, because some trackers upload that folder. Only its owner can read the file.
"""

import os
from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.private import Private
from groupwise.private.data import digest
from groupwise.training.checkpoint import load_checkpoint, save_checkpoint

STATE = "privacy.pt"


def key_path(folder: Path) -> Path:
    """The file beside ``folder`` with the key of its run: out -> out.noise_key.pt."""
    return Path(f"{folder.resolve()}.noise_key.pt")


def keep_key(folder: Path, noise: NoiseSource) -> None:
    """Save the key of the run in ``folder``; this happens before its first release."""
    path = key_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, noise.state_dict())


def check_new(folder: Path) -> None:
    """Raise a `UserError` if the folder has an unfinished run: a key, and a checkpoint of the same run."""
    path = key_path(folder)
    own = NoiseSource.from_state(load_checkpoint(path)).derive("checkpoint") if path.exists() else None
    if own and any(load_checkpoint(state).get("of_key") == own for state in folder.glob(f"checkpoint-*/{STATE}")):
        raise UserError(
            f"{folder} holds an unfinished private training, and a new one would spend another epsilon: resume it by "
            "train(resume_from_checkpoint=True), or give another output_dir."
        )


def find(folder: Path, asked: str | os.PathLike[str] | bool) -> Path:
    """The checkpoint to resume from: ``asked``, or the last one for True.

    Raises `UserError` if there is none, or it is incomplete or outside of ``folder``, beside which the key is.
    """
    found = asked if isinstance(asked, str | os.PathLike) else get_last_checkpoint(str(folder))
    if found is None or not all((Path(found) / name).exists() for name in (STATE, OPTIMIZER_NAME, TRAINER_STATE_NAME)):
        raise UserError(
            f"{found or folder} is not a complete checkpoint of a private training with its optimiser: give one that "
            "PrivateTrainer wrote without save_only_model, an earlier one if the last is truncated, or start over."
        )
    if (home := Path(found).absolute().parent).resolve() != folder.resolve():
        raise UserError(f"{found} is outside of output_dir={str(folder)!r}: give output_dir={str(home)!r}.")
    return Path(found)


def save(folder: Path, private: Private) -> None:
    """Write ``privacy.pt`` into a checkpoint's folder; weights and optimiser are saved by transformers."""
    state = private._state()  # without copies of the weights
    kept = {name: value for name, value in state.items() if name not in ("noise_key", "model", "optimizer")}
    weights = digest(state["model"])
    save_checkpoint(folder / STATE, {**kept, "of_key": private.core.noise.derive("checkpoint"), "weights": weights})


def load(folder: Path, private: Private) -> None:
    """Resume from a checkpoint whose weights and optimiser were loaded; raises `UserError` without the run's key."""
    saved, path, core = load_checkpoint(folder / STATE), key_path(folder.absolute().parent), private.core
    if not path.exists():
        raise UserError(
            f"The noise key is not at {path}: if the folder was moved, move the key there too. A finished run cannot "
            "be resumed."
        )
    key = load_checkpoint(path)
    if NoiseSource.from_state(key).derive("checkpoint") != saved["of_key"]:
        raise UserError(f"{path} is the key of another run than {folder}: give a checkpoint of the same run.")
    saved |= {"model": core.model.state_dict(), "optimizer": core.optimizer.state_dict()}
    if saved.get("weights") not in (None, digest(saved["model"])):  # None: of an earlier version
        raise UserError(
            f"Loading {folder} did not restore all weights, so the same noise would be added to other gradients: make "
            "the model as before, and name layers that train beside adapters of peft in modules_to_save."
        )
    private.load_state_dict(saved | key)
