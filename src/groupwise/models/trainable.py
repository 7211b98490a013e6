"""Chooses which parameters of a language model are trained (all, one kind, or adapters), and in which precision."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import UserError
from groupwise.models.language import is_head
from groupwise.torchvision_import import import_torchvision_first

SELF_ATTENTION = {"attention", "attn", "self_attn", "self_attention", "selfattention"}
"""Names of the self-attention module in transformers' models."""


def choose_trainable(model: nn.Module, settings: ModelConfig) -> nn.Module:
    """Freeze all parameters but those of `settings.trains`, in place; returns the model, wrapped by peft for `lora`.

    * all: every parameter that the model itself trains.
    * attention: every parameter inside a self-attention module (appendix A.2), and the head. For RoBERTa that is
      `attention.self` and `attention.output` with its LayerNorm; for GPT-2 `attn`, not the LayerNorm before it.
    * bias: every parameter called bias, and the head.
    * lora: low-rank adapters beside frozen layers, and the head.

    The head is what a classifier adds to the pretrained model (`is_head`). A language model has none: its output layer
    was pretrained, and is often tied to the token embedding. Trainable parameters are float32. Frozen matrices are
    `settings.frozen_dtype`, and so are frozen biases and norms beside adapters. Otherwise those are float32. bfloat16
    needs autocast in the forward pass.

    Raises:
        UserError: a choice that no parameter of the model matches, or adapters that peft refuses;
            `settings.rematerialize` for a model without activation checkpointing.
    """
    match settings.trains:
        case "attention":
            _train_only(
                model, lambda name: bool(SELF_ATTENTION & set(name.lower().split("."))), "self-attention module"
            )
        case "bias":
            _train_only(model, lambda name: name.rpartition(".")[2] == "bias", "bias")
        case "lora":
            model = add_adapters(model, settings.lora)
    for parameter in model.parameters():
        if parameter.requires_grad or settings.frozen_dtype == "float32":
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        elif parameter.dim() > 1:  # biases and norms are small, and torch's normalisation refuses mixed dtypes
            parameter.data = parameter.data.to(torch.bfloat16)
    if settings.rematerialize:
        _rematerialize(model)
    return model


def _rematerialize(model: Any) -> None:
    """Keep only each block's input; the backward pass computes the block again."""
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(network, "supports_gradient_checkpointing", False):
        raise UserError(
            f"{type(network).__name__} does not support activation checkpointing: leave model.rematerialize out."
        )
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of the new name, which older releases lack
        network.gradient_checkpointing_enable({"use_reentrant": False})


def _train_only(model: nn.Module, chosen: Callable[[str], bool], what: str) -> None:
    names = {name for name, _ in model.named_parameters() if chosen(name) and not is_head(model, name)}
    if not names:
        raise UserError(f"{type(model).__name__} has no {what} to train: choose another model.trains.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names or is_head(model, name))


def add_adapters(model: nn.Module, settings: LoraConfig) -> nn.Module:
    """Freeze the model and put an adapter B·A·alpha/rank beside each target layer; returns peft's wrapper.

    A starts at random from torch's global seed, B at zero, both in float32. The head of a classifier trains without
    adapters.

    Raises:
        UserError: a target names no layer, or peft refuses other settings.
    """
    import_torchvision_first()  # before transformers, whose import would fail
    import peft

    head = [name for name, _ in model.named_parameters() if is_head(model, name)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft corrects it layer by layer
        warnings.filterwarnings("ignore", category=FutureWarning)  # what peft still asks of transformers
        try:
            config = peft.LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,  # type: ignore[arg-type]
                lora_dropout=settings.dropout,
                target_modules=list(settings.targets) or None,
                exclude_modules=sorted({name.rpartition(".")[0] for name in head}) or None,
                modules_to_save=_modules(head) or None,
            )
            adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise UserError(f"peft refuses model.lora ({error}): correct model.lora.targets or the rest.") from error
    for target in settings.targets:
        if not any(f".{name}".endswith(f".{target}") for name in adapted.targeted_module_names):
            raise UserError(f"model.lora.targets={target} names no layer that can have an adapter: correct it.")
    return adapted  # type: ignore[no-any-return]


def _modules(head: list[str]) -> list[str]:
    """The outermost modules of these parameters: classifier, score, or bert.pooler."""
    parts = [name.split(".") for name in head]
    return sorted({".".join(p[: p.index("pooler") + 1]) if "pooler" in p else p[0] for p in parts})
