"""Finds pretrained models (in a folder, on the hub, in its cache); makes tokenisers and model configurations."""

import json
from pathlib import Path
from typing import Any

from groupwise.checkout import CHECKOUT
from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError, did_you_mean, reason
from groupwise.torchvision_import import mend_torchvision

OWN = "pretrained/"
"""Prefix of the models in the checkout, which are not on the hub."""
PATIENCE = 5.0
"""Seconds that the hub has to answer; transformers itself would retry for half a minute."""


def locate(key: str, name: str) -> str:
    """The argument for `from_pretrained`: a folder, or a name that exists on the hub.

    If the name is not a folder, the hub is asked once; if it cannot be reached, its local cache is used.

    Args:
        key: the key of the configuration that holds `name`, for messages.
        name: a folder, or a name on the hub.

    Raises:
        UserError: no such folder, and no such name on the hub or no hub.
    """
    place = find_source(name)
    if Path(place).is_dir():
        return place
    if name.startswith(OWN):
        raise UserError(
            f"{key}={name} is one of this project's models and is not here: run `make pretrained` for those of "
            "scale=lite, and take the others from a checkout."
        )
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    remedy = f"give {key}=FOLDER, written by save_pretrained"
    try:
        get_hf_file_metadata(hf_hub_url(place, "config.json"), timeout=PATIENCE)
    except HFValidationError as error:
        raise UserError(f"{key}={name} is neither a folder nor a valid name on the hub: {remedy}.") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise UserError(
            f"{key}={name} is not a folder, and the hub has no public model of that name: {remedy}."
        ) from error
    except Exception as error:  # a network may raise anything
        cached = try_to_load_from_cache(place, "config.json")
        if isinstance(cached, str):
            return str(Path(cached).parent)
        raise UserError(
            f"{key}={name} is not a folder, and the hub cannot be reached ({reason(error)}): {remedy}, or "
            "model.fresh=true with model.architecture for random weights."
        ) from error
    return place


def find_source(name: str) -> str:
    """The folder `name`, else that folder below the checkout (``pretrained/gpt2_mini``), else the name itself.

    A name that is returned unchanged is one on the Hugging Face hub or in its local cache.
    """
    for folder in (Path(name).expanduser(), CHECKOUT / name):
        if folder.is_dir():
            return str(folder)
    return name


GPT2_FILES = ("encoder.json", "vocab.bpe")


def load_tokenizer(name: str) -> Any:
    """The fast tokeniser of ``name``: a transformers folder, one with GPT-2's original files, or a name on the hub.

    Raises:
        UserError: there is no such tokeniser; the hub cannot be reached.
    """
    mend_torchvision()  # before transformers, whose import would fail
    from transformers import AutoTokenizer

    folder = Path(find_source(name))
    if all((folder / file).is_file() for file in GPT2_FILES):
        return gpt2_tokenizer(*read_gpt2(folder))
    place = locate("model.tokenizer", name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(place, use_fast=True, trust_remote_code=False)
        tokenizer(["A text."])  # settings of a wrong type raise only here
    except Exception as error:  # tokenizers raises bare ones
        raise UserError(
            f"{name} holds no tokeniser that can be read ({reason(error)}): give model.tokenizer=FOLDER, with a "
            f"transformers tokeniser or GPT-2's {' and '.join(GPT2_FILES)}."
        ) from error
    if not tokenizer.is_fast or len(tokenizer) == 0:
        raise UserError(f"The tokeniser {name} has no readable tokenizer.json: save it again as a fast tokeniser.")
    return tokenizer


def read_gpt2(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """GPT-2's vocabulary (token -> id) and its merges, in order, from encoder.json and vocab.bpe."""
    try:
        vocabulary = json.loads((folder / GPT2_FILES[0]).read_text(encoding="utf-8"))
        lines = (folder / GPT2_FILES[1]).read_text(encoding="utf-8").splitlines()
        merges = [(left, right) for left, right in (line.split(" ") for line in lines[1:] if line)]
        if not all(isinstance(number, int) for number in vocabulary.values()):
            raise ValueError("tokens are numbered with whole numbers")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{folder} has no readable {' and '.join(GPT2_FILES)} of GPT-2 ({reason(error)}): copy them again."
        ) from error
    return vocabulary, merges


def gpt2_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """A fast GPT-2 tokeniser from what `read_gpt2` gives; raises `UserError` where the two do not match."""
    mend_torchvision()
    from transformers import GPT2Tokenizer

    try:
        return GPT2Tokenizer(vocab=vocabulary, merges=merges)  # type: ignore[arg-type]
    except Exception as error:  # tokenizers raises bare ones
        raise UserError(f"GPT-2's {' and '.join(GPT2_FILES)} do not match ({reason(error)}): copy both.") from error


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def make_config(settings: ModelConfig, tokenizer: Any) -> Any:
    """The model's configuration: its shape, special tokens and dropout, without weights.

    Fresh weights take their special tokens from the tokeniser. Without `source` they also take the size of its
    vocabulary, unless `shape` gives one.

    Raises:
        UserError: no model is named, or it is not found; an unknown architecture, key or value; a size below 1; a
            tokeniser with more tokens than the model, or with another end of text; dropout in a model that has none.
    """
    if settings.fresh and settings.architecture:
        config = _described(settings, tokenizer)
    elif settings.source:
        config = _found(settings, tokenizer)
    else:
        raise UserError(
            "There is no language model to load: give model.source, a folder or a name on the hub, or model.fresh=true "
            "with model.architecture, such as gpt2."
        )
    _check_sizes(config, settings)
    _check_vocabulary(config, settings, tokenizer)
    _set_dropout(config, settings)
    return config


def named(settings: ModelConfig) -> str:
    """The model's name in messages."""
    if settings.fresh and settings.architecture:
        return f"model.architecture={settings.architecture}"
    return f"model.source={settings.source}"


def _described(settings: ModelConfig, tokenizer: Any) -> Any:
    import transformers

    known = list(transformers.CONFIG_MAPPING.keys())
    architecture = str(settings.architecture)
    if architecture not in known:
        close = did_you_mean(architecture, known)
        raise UserError(
            f"model.architecture={architecture} is not a model type of transformers{close}: give one, such as gpt2."
        )
    config_class = transformers.CONFIG_MAPPING[architecture]
    shape = _shape(config_class, settings)
    return _made(config_class, {"vocab_size": len(tokenizer), **_tokens(tokenizer), **shape})


def _found(settings: ModelConfig, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    source = str(settings.source)
    place = locate("model.source", source)
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise UserError(f"model.source={source} has no config.json: give a folder written by save_pretrained.")
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything on a broken config.json
        raise UserError(
            f"model.source={source} has no configuration that transformers can read ({reason(error)}): give a "
            "folder that save_pretrained wrote."
        ) from error
    if settings.fresh:
        return _made(type(config), {**config.to_dict(), **_tokens(tokenizer), **_shape(type(config), settings)})
    for key, value in _shape(type(config), settings).items():
        if getattr(config, key) != value:
            raise UserError(
                f"model.shape.{key}={value} is not that of model.source={source}, which has {getattr(config, key)}: "
                "choose model=hub, which assumes no shape, or add model.fresh=true."
            )
    if settings.architecture not in (None, config.model_type):
        raise UserError(
            f"model.source={source} is a {config.model_type}, not a {settings.architecture}: leave model.architecture "
            "out, or add model.fresh=true."
        )
    return config


def _shape(config_class: Any, settings: ModelConfig) -> dict[str, Any]:
    """`model.shape` under the configuration's own names."""
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    for key in settings.shape:
        if key not in known:
            raise UserError(
                f"model.shape.{key} is not a key of a {config_class.model_type} config{did_you_mean(key, known)}."
            )
    return {config_class.attribute_map.get(key, key): value for key, value in settings.shape.items()}


def _made(config_class: Any, values: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_class.from_dict(values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise UserError(f"model.shape does not fit a {config_class.model_type} ({reason}): correct it.") from error


def _tokens(tokenizer: Any) -> dict[str, int]:
    found = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    return {name: number for name, number in found.items() if number is not None}


def _check_sizes(config: Any, settings: ModelConfig) -> None:
    """Refuse sizes below 1, with which transformers builds some models all the same."""
    for name in SIZES:
        size = getattr(config, name, 1)
        if isinstance(size, int) and size < 1:
            own = config.attribute_map.get(name, name)
            raise UserError(f"{named(settings)} has {own}={size}: give a model whose sizes are 1 or more.")


def _check_vocabulary(config: Any, settings: ModelConfig, tokenizer: Any) -> None:
    rows = getattr(config, "vocab_size", None)
    if rows is not None and len(tokenizer) > rows:
        raise UserError(
            f"The tokeniser has {len(tokenizer)} tokens, but {named(settings)} embeds only {rows}: give the tokeniser "
            "of that model (model.tokenizer), or a larger model.shape.vocab_size for fresh weights."
        )
    ends = config.eos_token_id, tokenizer.eos_token_id
    if not settings.fresh and all(isinstance(end, int) for end in ends) and ends[0] != ends[1]:
        raise UserError(
            f"The tokeniser ends a text with token {ends[1]}, but {named(settings)} with token {ends[0]}: give the "
            "model's own tokeniser (model.tokenizer)."
        )


def _set_dropout(config: Any, settings: ModelConfig) -> None:
    """Set all dropout rates, under the names of the model's family; layer dropout is always 0."""
    rates = [
        name
        for name, value in config.to_dict().items()
        if "drop" in name and "layerdrop" not in name and isinstance(value, float | int) and not isinstance(value, bool)
    ]
    attention = [name for name in rates if name.startswith("att")]
    others = [name for name in rates if name not in attention]
    for key, value, names in (
        ("dropout", settings.dropout, others),
        ("attention_dropout", settings.attention_dropout, attention),
    ):
        if value and not names:
            raise UserError(f"model.{key}={value:g} was given, but a {config.model_type} has none: leave it out.")
        for name in names if value is not None else ():
            setattr(config, name, float(value))  # type: ignore[arg-type]
