"""Makes the transformers configuration of a language model: of a folder or the hub, or from its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError, did_you_mean, reason
from groupwise.models.hub import locate

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def make_config(settings: ModelConfig, tokenizer: Any) -> Any:
    """What the model will be: its shape, its special tokens and its dropout; no weights yet.

    Fresh weights take their special tokens from the tokeniser, and without `source` the size of its vocabulary, where
    `shape` gives none.

    Raises:
        UserError: no model is named; nothing there; an unknown architecture, key or value; a size below 1; a tokeniser
            with more tokens than the model, or with another end of text; dropout in a model that has none.
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
    """How messages call the model."""
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
            f"model.architecture={architecture} is no model type of transformers{close}: give one, such as gpt2."
        )
    config_class = transformers.CONFIG_MAPPING[architecture]
    shape = _shape(config_class, settings)
    return _made(config_class, {"vocab_size": len(tokenizer), **_tokens(tokenizer), **shape})


def _found(settings: ModelConfig, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    source = str(settings.source)
    place = locate("model.source", source)
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise UserError(f"model.source={source} has no config.json: give a folder that save_pretrained wrote.")
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of a broken config.json
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
    """`model.shape` under the names that the configuration itself uses."""
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    for key in settings.shape:
        if key not in known:
            raise UserError(
                f"model.shape.{key} is no key of a {config_class.model_type} configuration{did_you_mean(key, known)}."
            )
    return {config_class.attribute_map.get(key, key): value for key, value in settings.shape.items()}


def _made(config_class: Any, values: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_class.from_dict(values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise UserError(f"model.shape makes no {config_class.model_type} ({reason}): correct it.") from error


def _tokens(tokenizer: Any) -> dict[str, int]:
    found = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    return {name: number for name, number in found.items() if number is not None}


def _check_sizes(config: Any, settings: ModelConfig) -> None:
    """Transformers builds some models with sizes that no text can pass through."""
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
            "that the model was made with (model.tokenizer), or a larger model.shape.vocab_size for fresh weights."
        )
    ends = config.eos_token_id, tokenizer.eos_token_id
    if not settings.fresh and all(isinstance(end, int) for end in ends) and ends[0] != ends[1]:
        raise UserError(
            f"The tokeniser ends a text with token {ends[1]}, but {named(settings)} with token {ends[0]}: give the "
            "tokeniser that the model was made with (model.tokenizer)."
        )


def _set_dropout(config: Any, settings: ModelConfig) -> None:
    """Every rate that the configuration has, whatever its family calls it; whole layers are never dropped out."""
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
            raise UserError(f"model.{key}={value:g} was asked for, but a {config.model_type} has none: leave it out.")
        for name in names if value is not None else ():
            setattr(config, name, float(value))  # type: ignore[arg-type]
