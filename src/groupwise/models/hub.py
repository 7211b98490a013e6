"""Finds where `from_pretrained` takes a name from: a folder, the hub, or its cache; refuses in seconds."""

from __future__ import annotations

from pathlib import Path

import groupwise
from groupwise.errors import UserError, reason

PATIENCE = 5.0
"""Seconds that the hub has to answer; transformers itself would go on asking for half a minute."""


def locate(key: str, name: str) -> str:
    """What to hand to `from_pretrained`: a folder, or a name that the hub has just shown to know.

    A name that is no folder is asked for at the hub, once; where the hub cannot be reached, its cache will do.

    Args:
        key: the key of the configuration that holds `name`, for messages.
        name: a folder, or a name on the hub.

    Raises:
        UserError: no such folder, and no such name on the hub or no hub.
    """
    place = find_source(name)
    if Path(place).is_dir():
        return place
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    mend = f"give {key}=FOLDER, one that save_pretrained wrote"
    try:
        get_hf_file_metadata(hf_hub_url(place, "config.json"), timeout=PATIENCE)
    except HFValidationError as error:
        raise UserError(f"{key}={name} is no folder, and no name on the hub is spelt like that: {mend}.") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise UserError(
            f"{key}={name} is no folder, and the hub shows no model of that name without a login: {mend}."
        ) from error
    except Exception as error:  # whatever networks do
        cached = try_to_load_from_cache(place, "config.json")
        if isinstance(cached, str):
            return str(Path(cached).parent)
        raise UserError(
            f"{key}={name} is no folder, and the hub cannot be reached ({reason(error)}): {mend}, or "
            "model.fresh=true with model.architecture for random weights."
        ) from error
    return place


def find_source(name: str) -> str:
    """A folder as it is named, else that folder below the checkout (``pretrained/gpt2_mini``), else the name itself.

    What is returned as it came is a name on the Hugging Face hub, or in its local cache.
    """
    checkout = Path(groupwise.__file__).resolve().parents[2]
    for folder in (Path(name).expanduser(), checkout / name):
        if folder.is_dir():
            return str(folder)
    return name
