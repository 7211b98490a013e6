"""Saves what a private training needs to resume in transformers' checkpoints, and the key of the noise elsewhere.

The folder of a checkpoint may be published: its `privacy.pt` has the plan, thresholds and steps, but not the key. The
key lies beside ``output_dir``, which some trackers upload whole, in a file that only its owner can read.
"""

import os
from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

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
    """Keep the key of a run that writes its checkpoints into ``folder``, before its first release."""
    path = key_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, noise.state_dict())


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
    """The checkpoint to resume from: ``asked``, or for True the last.

    Raises:
        UserError: there is none, it is not whole, or it lies elsewhere, where its key would stay.
    """
    found = asked if isinstance(asked, str | os.PathLike) else get_last_checkpoint(str(folder))
    if found is None or not all((Path(found) / name).exists() for name in (STATE, OPTIMIZER_NAME, TRAINER_STATE_NAME)):
        raise UserError(
            f"{found or folder} is no whole checkpoint of a private training with its optimiser: give one that "
            "PrivateTrainer wrote without save_only_model, an earlier one if the last was cut off, or start over."
        )
    if (home := Path(found).absolute().parent).resolve() != folder.resolve():
        raise UserError(f"{found} lies outside of output_dir={str(folder)!r}: give output_dir={str(home)!r}.")
    return Path(found)


def save(folder: Path, private: Private) -> None:
    """Write ``privacy.pt`` into a checkpoint's folder, where weights and optimiser are."""
    state = private._state()  # without copies of the weights
    kept = {name: value for name, value in state.items() if name not in ("noise_key", "model", "optimizer")}
    save_checkpoint(folder / STATE, {**kept, "of_key": private.core.noise.derive("checkpoint")})


def load(folder: Path, private: Private) -> None:
    """Resume from a checkpoint whose weights and optimiser were read already, with its key.

    Raises:
        UserError: other settings, another key, or none.
    """
    saved, path, core = load_checkpoint(folder / STATE), key_path(folder.absolute().parent), private.core
    if not path.exists():
        raise UserError(
            f"The key of the noise is not at {path}: bring it there if the run was killed or its folder moved; one "
            "that is done cannot be resumed."
        )
    key = load_checkpoint(path)
    if NoiseSource.from_state(key).derive("checkpoint") != saved["of_key"]:
        raise UserError(f"{path} is the key of another run than {folder}: give a checkpoint of the same run.")
    own = {"model": core.model.state_dict(), "optimizer": core.optimizer.state_dict()}
    private.load_state_dict({**saved, **key, **own})
