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
    own = _own_mark(path) if path.exists() else None
    if own and any(load_checkpoint(state).get("of_key") == own for state in folder.glob(f"checkpoint-*/{STATE}")):
        raise UserError(
            f"{folder} holds an unfinished private training, and a new one would spend another epsilon: resume it by "
            "train(resume_from_checkpoint=True), or give another output_dir."
        )


def find(folder: Path, asked: str | os.PathLike[str] | bool) -> Path:
    """The checkpoint to resume from: ``asked``, or the last one for True.

    Raises `UserError` if there is none, or it is incomplete, of another run than the key beside ``folder``, or outside
    of ``folder``. Nothing is loaded.
    """
    found = asked if isinstance(asked, str | os.PathLike) else get_last_checkpoint(str(folder))
    if found is None or not all((Path(found) / name).exists() for name in (STATE, OPTIMIZER_NAME, TRAINER_STATE_NAME)):
        raise UserError(
            f"{found or folder} is not a complete checkpoint of a private training with its optimiser: give one that "
            "PrivateTrainer wrote without save_only_model, an earlier one if the last is truncated, or start over."
        )
    if (home := Path(found).absolute().parent).resolve() != folder.resolve():
        raise UserError(f"{found} is outside of output_dir={str(folder)!r}: give output_dir={str(home)!r}.")
    if not (path := key_path(folder)).exists():
        raise UserError(
            f"The noise key is not at {path}: if the folder was moved, move the key there too. A finished run cannot "
            "be resumed."
        )
    if _own_mark(path) != load_checkpoint(Path(found) / STATE)["of_key"]:
        raise UserError(f"{path} is the key of another run than {found}: give a checkpoint of the same run.")
    return Path(found)


def _own_mark(path: Path) -> bytes:
    """What the checkpoints of the run with this key hold."""
    return NoiseSource.from_state(load_checkpoint(path)).derive("checkpoint")


def save(folder: Path, private: Private) -> None:
    """Write ``privacy.pt`` into a checkpoint's folder; weights and optimiser are saved by transformers."""
    state = private._state()  # without copies of the weights
    left = ("noise_key", "clip_plan", "model", "optimizer")  # a plan has the lengths of the drawn examples
    kept = {name: value for name, value in state.items() if name not in left}
    weights = digest(state["model"])
    save_checkpoint(folder / STATE, {**kept, "of_key": private.core.noise.derive("checkpoint"), "weights": weights})


def load(folder: Path, private: Private) -> None:
    """Resume from a checkpoint that `find` returned, whose weights and optimiser were loaded."""
    saved, key, core = load_checkpoint(folder / STATE), key_path(folder.absolute().parent), private.core
    saved |= {"model": core.model.state_dict(), "optimizer": core.optimizer.state_dict(), "clip_plan": {}}
    if saved.get("weights") not in (None, digest(saved["model"])):  # None: of an earlier version
        raise UserError(
            f"Loading {folder} did not restore all weights, so the same noise would be added to other gradients: make "
            "the model as before, and name layers that train beside adapters of peft in modules_to_save."
        )
    private.load_state_dict(saved | load_checkpoint(key))
