"""Small text models of transformers, and adapters of peft on two of them, as listed in `libraries.yaml`."""

import re
from typing import Any

from torch import Tensor, nn

from groupwise.torchvision_import import import_torchvision_first
from trust.models.architecture import Architecture, Batch, Size, Subject, classified, in_eval, next_tokens
from trust.models.libraries import LISTED, settings

FAMILY = "transformers"


def configure(size: Size, kind: str, **own: Any) -> Any:
    """A small configuration with the dropout rate of `size` and no layer drop. A value of None leaves the key out."""
    import_torchvision_first()  # transformers imports torchvision; this import handles a broken one
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()  # no warnings on missing kernels, or on tokens outside the small vocabulary
    common = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": 4,
        "intermediate_size": 2 * size.width,
        "max_position_embeddings": 2 * size.tokens + 4,
        "num_labels": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        "initializer_range": 0.1,
    }
    given = {**common, **settings(size, own)}
    config = AutoConfig.for_model(kind, **{name: value for name, value in given.items() if value is not None})
    set_dropout(config, size.dropout)
    return config


def set_dropout(config: Any, probability: float) -> None:
    """Set all dropouts of a configuration and of the configurations inside it."""
    for name, value in vars(config).copy().items():
        if name.startswith("_"):
            continue
        if hasattr(value, "to_dict"):
            set_dropout(value, probability)
        elif re.search("layer_?drop$", name):
            setattr(config, name, 0.0)
        elif re.search("drop", name) and isinstance(value, float):
            setattr(config, name, probability)


def build_model(head: str, config: Any) -> nn.Module:
    """`AutoModelFor{head}` or a class of that name, with random weights."""
    import transformers

    automatic = getattr(transformers, f"AutoModelFor{head}", None)
    config._experts_implementation = "eager"  # the grouped product does not support float64
    return automatic.from_config(config) if automatic else getattr(transformers, head)(config)


def classifier(name: str, own: dict[str, Any]) -> Architecture:
    """Text with padding, and one label for each example."""

    def make(size: Size) -> Subject:
        model = build_model("SequenceClassification", configure(size, **own))
        batch = {"input_ids": size.ids(), "attention_mask": size.mask, "labels": size.labels()}
        return Subject(model, batch, classifier_losses)

    return Architecture(name, FAMILY, make)


def classifier_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Losses (B,) of a model that takes everything except the labels, and returns its logits first."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return classified(model(**inputs)[0], batch["labels"])


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Next-token losses (B,) of a decoder. A mask called "mask" is not passed to the model; the logits of prompts,
    which come first, are left out."""
    inputs = {name: value for name, value in batch.items() if name != "mask"}
    ids = batch.get("decoder_input_ids", batch["input_ids"])
    logits = model(**inputs).logits[:, -ids.shape[1] :]
    return next_tokens(logits, ids, batch["attention_mask" if "mask" not in batch else "mask"])


def causal(name: str, own: dict[str, Any]) -> Architecture:
    """Text, with the mean loss over the tokens of each example; with `positions`, position ids are passed."""

    def make(size: Size) -> Subject:
        given = dict(own)
        positions, padding = given.pop("positions", False), given.pop("padding", True)
        model = build_model("CausalLM", configure(size, **given))
        batch = {"input_ids": size.ids(), "attention_mask" if padding else "mask": size.mask}
        if positions:
            batch["position_ids"] = (size.mask.cumsum(1) - 1).clamp_min(0)
        return Subject(model, batch, token_losses)

    return Architecture(name, FAMILY, make)


def translator(name: str, own: dict[str, Any]) -> Architecture:
    """An encoder and a decoder, with the mean loss over the target tokens of each example."""

    def make(size: Size) -> Subject:
        layers: dict[str, Any] = {
            "encoder_layers": size.depth,
            "decoder_layers": size.depth,
            "decoder_start_token_id": 1,
        }
        model = build_model("Seq2SeqLM", configure(size, **layers, **own))
        batch = {"input_ids": size.ids(), "attention_mask": size.mask, "decoder_input_ids": size.ids()}
        return Subject(model, batch, token_losses)

    return Architecture(name, FAMILY, make)


TASKS = {"classifier": classifier, "causal": causal, "translator": translator}


def text(name: str, own: dict[str, Any]) -> Architecture:
    """One architecture of the list."""
    return TASKS[own.get("task", "classifier")](name, {key: value for key, value in own.items() if key != "task"})


def adapted(name: str, own: dict[str, Any]) -> Architecture:
    """One architecture of the list: the base model, peft's configuration class, and its arguments."""

    def make(size: Size) -> Subject:
        import_torchvision_first()
        import peft

        given = settings(size, own)
        below, config = given.pop("below"), given.pop("config")
        if config in ("LoraConfig", "AdaLoraConfig"):
            given["lora_dropout"] = size.dropout
        heads = {"num_key_value_heads": 4} if below == "llama" else {}
        base = build_model("CausalLM", configure(size, below, **heads))
        model = peft.get_peft_model(base, getattr(peft, config)(task_type="CAUSAL_LM", **given))  # type: ignore[arg-type]
        for module in model.modules():
            if getattr(module, "module_dropout", None):  # it draws one number for the whole batch, even at rate 0
                in_eval(module)
        return Subject(model, {"input_ids": size.ids(), "attention_mask": size.mask}, token_losses)

    return Architecture(name, "peft", make)


TEXT = tuple(text(name, own) for name, own in LISTED["text"].items())
ADAPTERS = tuple(adapted(name, own) for name, own in LISTED["peft"].items())
