"""Which parameters of a language model train (all, some kind of them, or adapters), and in which precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from groupwise.config import ModelConfig
from groupwise.errors import UserError
from groupwise.models.adapters import MovedAdapters, add_adapters
from groupwise.models.language import is_head

__all__ = ["MovedAdapters", "choose_trainable"]

SELF_ATTENTION = {"attention", "attn", "self_attn", "self_attention", "selfattention"}
"""What transformers' models call the module of their self-attention."""


def choose_trainable(model: nn.Module, settings: ModelConfig) -> nn.Module:
    """Freeze all but what `settings.trains` names, in place; returns the model, wrapped by peft for `lora`.

    * all: everything that trains in the model as it is.
    * attention: every parameter inside a self-attention module (appendix A.2), and the head. For RoBERTa that is
      `attention.self` and `attention.output` with its LayerNorm; for GPT-2 `attn`, not the LayerNorm before it.
    * bias: every parameter called bias, and the head.
    * embeddings: the token embedding, and the head.
    * lora: low-rank adapters beside frozen layers, and the head.

    The head is what a classifier adds to the pretrained model (`is_head`). A language model has none: its output layer
    was pretrained, and often is the token embedding itself. What trains is float32. Frozen matrices are
    `settings.frozen_dtype`; bfloat16 needs autocast in the forward pass, which brings them and float32 layers together.

    Raises:
        UserError: an unknown choice, one that the model has no parameter for, or an unknown target of adapters.
    """
    match settings.trains:
        case "all":
            pass
        case "attention":
            _train_only(
                model, lambda name: bool(SELF_ATTENTION & set(name.lower().split("."))), "self-attention module"
            )
        case "bias":
            _train_only(model, lambda name: name.rpartition(".")[2] == "bias", "bias")
        case "embeddings":
            tokens: Any = model.get_input_embeddings()  # type: ignore[operator]
            _train_only(model, lambda name: model.get_parameter(name) is tokens.weight, "token embedding")
        case "lora":
            model = add_adapters(model, settings.lora)
        case _:
            raise UserError(f"model.trains={settings.trains} is not one of all, attention, bias, embeddings, lora.")
    if settings.frozen_dtype not in ("float32", "bfloat16"):
        raise UserError(f"model.frozen_dtype={settings.frozen_dtype} is not one of float32, bfloat16.")
    for parameter in model.parameters():
        if parameter.requires_grad or settings.frozen_dtype == "float32":
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        elif parameter.dim() > 1:  # biases and norms weigh nothing, and torch's own norms refuse some mixtures
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _train_only(model: nn.Module, chosen: Callable[[str], bool], what: str) -> None:
    names = {name for name, _ in model.named_parameters() if chosen(name)}
    if not names:
        raise UserError(f"{type(model).__name__} has no {what} that could train alone: choose another model.trains.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names or is_head(model, name))
