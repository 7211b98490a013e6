"""Finds pretrained models (in a folder, on the hub, in its cache); makes tokenisers and model configurations."""

from pathlib import Path
from typing import Any

from groupwise.checkout import CHECKOUT
from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError, did_you_mean, reason
from groupwise.torchvision_import import import_torchvision_first

OWN = "pretrained/"
"""Prefix of the models in the checkout, which are not on the hub."""


def locate(key: str, name: str) -> str:
    """The argument for `from_pretrained`: a folder, or a name that transformers looks up on the hub or in its cache.

    Raises `UserError` for a model of this project whose folder is missing; `key` is the key that holds its name.
    """
    place = find_source(name)
    if name.startswith(OWN) and not Path(place).is_dir():
        raise UserError(
            f"{key}={name} is a model of this project, and its folder is missing: run `make pretrained` for the "
            "models of scale=lite; the others are in the git repository."
        )
    return place


def find_source(name: str) -> str:
    """The folder `name`, else that folder below the checkout (``pretrained/gpt2_mini``), else the name itself.

    A name that is returned unchanged is one on the Hugging Face hub or in its local cache.
    """
    for folder in (Path(name).expanduser(), CHECKOUT / name):
        if folder.is_dir():
            return str(folder)
    return name


def refuse_unreachable(name: str, error: Exception) -> None:
    """Raise a `UserError` if transformers failed because ``name`` is not cached and the hub cannot be reached."""
    if "couldn't connect" in str(error):
        raise UserError(
            f"{name} is not on this machine, and the Hugging Face hub cannot be reached: download it first (`hf "
            f"download {name}`), or give folders (model.source=FOLDER, model.tokenizer=FOLDER)."
        ) from error


def load_tokenizer(name: str) -> Any:
    """The fast tokeniser of ``name``: a transformers folder, or a name on the hub.

    Raises:
        UserError: there is no such tokeniser; the hub cannot be reached.
    """
    import_torchvision_first()  # before transformers, whose import would fail
    from transformers import AutoTokenizer

    place = locate("model.tokenizer", name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(place, use_fast=True, trust_remote_code=False)
        tokenizer(["A text."])  # settings of a wrong type raise only here
    except Exception as error:  # tokenizers raises bare ones
        refuse_unreachable(name, error)
        raise UserError(
            f"{name} has no readable tokeniser ({reason(error)}): give model.tokenizer, a folder of save_pretrained."
        ) from error
    if not tokenizer.is_fast or len(tokenizer) == 0:
        raise UserError(f"The tokeniser {name} has no readable tokenizer.json: save it again as a fast tokeniser.")
    return tokenizer


SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def make_config(settings: ModelConfig, tokenizer: Any) -> Any:
    """The model's configuration: its shape, special tokens and dropout, without weights.

    With fresh weights, the special tokens are those of the tokeniser. Without `source`, the vocabulary has the size of
    the tokeniser's too, unless `shape` gives another.

    Raises:
        UserError: no model is named, or it is not found; an unknown architecture, key or value; a tokeniser with more
            tokens than the model; dropout in a model that has none.
    """
    if settings.fresh and settings.architecture:
        config = _described(settings, tokenizer)
    elif settings.source:
        config = _found(settings, tokenizer)
    else:
        raise UserError(
            "There is no language model to load: give model.source, or model.fresh=true with model.architecture."
        )
    rows = getattr(config, "vocab_size", None)
    if rows is not None and len(tokenizer) > rows:
        raise UserError(
            f"The tokeniser has {len(tokenizer)} tokens, but {named(settings)} embeds only {rows}: give the tokeniser "
            "of that model (model.tokenizer), or a larger model.shape.vocab_size for fresh weights."
        )
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
    return _made(transformers.CONFIG_MAPPING[architecture], {"vocab_size": len(tokenizer)}, settings, tokenizer)


def _found(settings: ModelConfig, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    source = str(settings.source)
    place = locate("model.source", source)
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything on a broken config.json
        refuse_unreachable(source, error)
        raise UserError(
            f"model.source={source} has no configuration that transformers can read ({reason(error)}): give a "
            "folder that save_pretrained wrote."
        ) from error
    if settings.fresh:
        return _made(type(config), config.to_dict(), settings, tokenizer)
    for key, value in _shape(type(config), settings).items():
        if getattr(config, key) != value:
            raise UserError(
                f"model.shape.{key}={value} contradicts model.source={source}, which has {getattr(config, key)}: "
                "choose model=hub, which sets no shape, or add model.fresh=true for random weights."
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


def _made(config_class: Any, values: dict[str, Any], settings: ModelConfig, tokenizer: Any) -> Any:
    """A configuration with these values, the tokeniser's special tokens, and `model.shape`."""
    from huggingface_hub.errors import StrictDataclassError

    tokens = {name: number for name in SPECIAL_TOKENS if (number := getattr(tokenizer, name)) is not None}
    values = {**values, **tokens, **_shape(config_class, settings)}
    try:
        return config_class.from_dict(values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise UserError(f"model.shape does not fit a {config_class.model_type} ({reason}): correct it.") from error


def _set_dropout(config: Any, settings: ModelConfig) -> None:
    """Set all dropout rates but those of whole layers, under the names of the model's family."""
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
            raise UserError(
                f"model.{key}={value:g} was given, but a {config.model_type} model has no such dropout: leave it out."
            )
        for name in names if value is not None else ():
            setattr(config, name, float(value))  # type: ignore[arg-type]
