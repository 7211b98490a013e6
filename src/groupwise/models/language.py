"""Makes language models of the transformers library, with weights from a folder or the hub, or fresh ones."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError, reason
from groupwise.models.hub import locate, make_config, named, refuse_unreachable
from groupwise.torchvision_import import import_torchvision_first


def load_classifier(settings: ModelConfig, classes: tuple[str, ...], tokenizer: Any) -> nn.Module:
    """A model with a head for `classes`, in training mode, float32: logits (B, len(classes)).

    A head for another number of classes, or none, is initialised at random from torch's global seed.
    So is BERT's pooler if only a language model was pretrained. Causal models classify by their last token.

    Raises:
        UserError: as `make_config`; weights that cannot be read, are not safetensors, or lack more than the head; a
            head for as many other classes, or in another order.
    """
    import_torchvision_first()  # before transformers, whose import would fail
    config = make_config(settings, tokenizer)
    theirs = tuple(str(name).lower() for _, name in sorted(config.id2label.items()))
    if not settings.fresh and theirs != classes and len(theirs) == len(classes) and theirs[0] != "label_0":
        raise UserError(
            f"{named(settings)} has a head for {', '.join(theirs)}, not {', '.join(classes)}: start from the model as "
            "it was before its fine-tuning."
        )
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: label for label, name in enumerate(classes)}
    return _load(settings, config, tokenizer, "SequenceClassification")


def load_causal(settings: ModelConfig, tokenizer: Any) -> nn.Module:
    """A model that predicts the next token, in training mode, float32: logits (B, T, V).

    Head and token embedding are tied if the model's configuration says so; `settings.untie` makes the head a copy.

    Raises:
        UserError: as `load_classifier`; or the model is an encoder, which sees future tokens.
    """
    import_torchvision_first()  # before transformers, whose import would fail
    import transformers

    config = make_config(settings, tokenizer)
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING  # transformers refuses one without a causal head
    both_ways = getattr(config.get_text_config(), "use_bidirectional_attention", False) is True  # EmbeddingGemma
    if both_ways or config.is_encoder_decoder or (masked and not getattr(config, "is_decoder", False)):
        raise UserError(
            f"{named(settings)} ({config.model_type}) does not predict the next token: give a causal language model."
        )
    return _load(settings, config, tokenizer, "CausalLM")


def position_limit(model: nn.Module) -> int:
    """The most tokens that an example may have: 1024 for GPT-2, 512 for RoBERTa (514 positions, two of them unused)."""
    limit = int(getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    padding = padding_position(model)
    return limit if padding is None else limit - padding - 1


def padding_position(model: nn.Module) -> int | None:
    """The padding row of the position table, if it has one."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return next((getattr(table, "padding_idx", None) for table in tables), None)


def is_head(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to the head that a classifier adds to the pretrained model (its pooler included).

    The output layer of a language model was pretrained, so it is not a head.
    """
    network: Any = model
    if network.get_output_embeddings() is not None:
        return False
    return not name.startswith(f"{network.base_model_prefix}.") or ".pooler." in name


def _load(settings: ModelConfig, config: Any, tokenizer: Any, kind: str) -> nn.Module:
    import transformers

    if config.model_type == "xlnet":
        raise UserError(f"{named(settings)} is an XLNet, which needs padding on the left: give another model.")
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None or text.pad_token_id < 0:
        text.pad_token_id = None  # the embedding would take -1 for a padding row
    automatic = getattr(transformers, f"AutoModelFor{kind}")
    # Frozen weights in half precision are never held in float32; `choose_trainable` converts trainable ones to it.
    half = settings.trains == "lora" and settings.frozen_dtype == "bfloat16"
    options = {
        "dtype": torch.bfloat16 if half else torch.float32,
        "attn_implementation": settings.attention,
        "trust_remote_code": False,
    }
    with _quiet():
        model = (_build if settings.fresh else _read)(settings, automatic, config, options)
    if settings.untie:
        untie(model)
    text = model.config.get_text_config()
    if text.pad_token_id is None:  # after the embedding was made: otherwise it would not train the padding row
        padding = tokenizer.pad_token_id
        text.pad_token_id = tokenizer.eos_token_id if padding is None else padding
        if model.can_generate():
            model.generation_config.pad_token_id = text.pad_token_id
    return model.train()


def padding_token(model: nn.Module) -> int:
    """The model's padding token, or 0 if it has none. A causal classifier reads the last token before the padding."""
    found = model.config.get_text_config().pad_token_id  # type: ignore[operator,union-attr]
    return 0 if found is None else int(found)


def _build(settings: ModelConfig, automatic: Any, config: Any, options: dict[str, Any]) -> Any:
    try:
        return automatic.from_config(config, **options)
    except Exception as error:  # the model's own code may raise anything
        remedy = _no_sdpa(error) or "correct model.shape"
        raise UserError(f"{named(settings)} cannot be built ({reason(error)}): {remedy}.") from error


def _read(settings: ModelConfig, automatic: Any, config: Any, options: dict[str, Any]) -> Any:
    place = locate("model.source", str(settings.source))
    try:
        model, info = automatic.from_pretrained(
            place,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,  # no pickle
            **options,
        )
    except Exception as error:  # transformers, safetensors and the model's own code may raise anything on broken files
        refuse_unreachable(str(settings.source), error)
        remedy = _no_sdpa(error) or "give a folder written by save_pretrained, or model.fresh=true for random weights"
        raise UserError(f"{named(settings)} cannot be loaded ({reason(error)}): {remedy}.") from error
    if getattr(model, "peft_config", None):
        raise UserError(f"{named(settings)} holds adapters of peft: give the folder of the merged model.")
    absent = sorted(name for name in info["missing_keys"] if not is_head(model, name))
    misshapen = sorted(name for name, *_ in info["mismatched_keys"] if not is_head(model, name))
    for names, what in ((absent, "has no weights for"), (misshapen, "has weights of another shape for")):
        if names:
            others = f" and {len(names) - 1} more" if names[1:] else ""
            raise UserError(
                f"{named(settings)} {what} {names[0]!r}{others} of a {type(model).__name__}: give a folder whose "
                "weights and config.json belong to such a model."
            )
    return model


def _no_sdpa(error: Exception) -> str:
    return "give model.attention=eager" if "scaled_dot_product_attention" in str(error) else ""


def untie(model: Any) -> None:
    """Give the head its own copy of the token embedding, unless the two are untied already."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        model.config.tie_word_embeddings = False


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch off transformers' warnings about new heads, which are expected, and its progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class MeanPooled(nn.Module):
    """`model.pool=mean`: a classifier of transformers whose head reads the mean over all tokens except padding.

    The module that would read the first token (RoBERTa's head, BERT's pooler) reads the mean instead. This is called
    like the model, and returns the model's outputs, with `logits` (B, classes).

    Raises:
        UserError: the model has no such module.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        head, pooler = getattr(model, "classifier", None), getattr(model.base_model, "pooler", None)
        if not type(head).__name__.endswith("ClassificationHead"):
            head = pooler
        if head is None:
            raise UserError(
                f"model.pool=mean is for heads that read the first token, such as RoBERTa's and BERT's, but "
                f"{type(model).__name__} has no such head: leave model.pool out."
            )
        self.model = model
        self._reader = (head,)  # in a tuple, so that torch does not register it a second time

    def forward(self, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """The model's outputs from `attention_mask` (B, T) and its other inputs."""

        def mean(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
            states = arguments[0]
            if attention_mask is None or states.shape[:2] != attention_mask.shape:
                raise UserError(f"The head of {type(self.model).__name__} gets one token alone: leave model.pool out.")
            kept = attention_mask.unsqueeze(-1).to(states.dtype)
            return ((states * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True),)

        with self._reader[0].register_forward_pre_hook(mean):
            return self.model(attention_mask=attention_mask, **inputs)
