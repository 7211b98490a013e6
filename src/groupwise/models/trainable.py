"""Chooses which parameters of a language model train (all, some kind, or adapters), and in which precision."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import UserError
from groupwise.models.language import is_head
from groupwise.torchvision_import import mend_torchvision

SELF_ATTENTION = {"attention", "attn", "self_attn", "self_attention", "selfattention"}
"""Names of the self-attention module in transformers' models."""


def choose_trainable(model: nn.Module, settings: ModelConfig) -> nn.Module:
    """Freeze all parameters but those of `settings.trains`, in place; returns the model, wrapped by peft for `lora`.

    * all: every parameter that the model itself trains.
    * attention: every parameter inside a self-attention module (appendix A.2), and the head. For RoBERTa that is
      `attention.self` and `attention.output` with its LayerNorm; for GPT-2 `attn`, not the LayerNorm before it.
    * bias: every parameter called bias, and the head.
    * embeddings: the token embedding, and the head.
    * lora: low-rank adapters beside frozen layers, and the head.

    The head is what a classifier adds to the pretrained model (`is_head`). A language model has none: its output layer
    was pretrained, and is often tied to the token embedding. Trainable parameters are float32. Frozen matrices are
    `settings.frozen_dtype`; bfloat16 needs autocast in the forward pass, where they meet float32 layers.

    Raises:
        UserError: an unknown choice, one that no parameter of the model matches, or an unknown target of adapters;
            `settings.rematerialize` for a model that cannot compute its blocks again.
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
        elif parameter.dim() > 1:  # biases and norms are small, and torch's norms refuse mixed dtypes
            parameter.data = parameter.data.to(torch.bfloat16)
    if settings.rematerialize:
        _rematerialize(model)
    return model


def _rematerialize(model: Any) -> None:
    """Keep only each block's input; the backward pass computes the block again."""
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(network, "supports_gradient_checkpointing", False):
        raise UserError(f"{type(network).__name__} cannot compute its blocks again: leave model.rematerialize out.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of the newer name, which older releases lack
        network.gradient_checkpointing_enable({"use_reentrant": False})


def _train_only(model: nn.Module, chosen: Callable[[str], bool], what: str) -> None:
    names = {name for name, _ in model.named_parameters() if chosen(name)}
    if not names:
        raise UserError(f"{type(model).__name__} has no {what} that could train alone: choose another model.trains.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names or is_head(model, name))


def add_adapters(model: nn.Module, settings: LoraConfig) -> nn.Module:
    """Freeze the model and put an adapter B·A·alpha/rank beside each target layer; returns peft's wrapper.

    A starts at random from torch's global seed, B at zero, both in float32. The head of a classifier trains without
    adapters.

    Raises:
        UserError: a target that names no layer which could take an adapter; no target, for a model without defaults in
            peft; settings that peft refuses.
    """
    mend_torchvision()  # before transformers, whose import would fail
    import peft

    layers = _layers(model)
    targets = list(settings.targets) or _usual_targets(model, layers)
    for target in targets:
        if not any(_ends_with(name, target) for name in layers):
            raise UserError(
                f"model.lora.targets={target} names no layer that could take an adapter: give some of {_ends(layers)}."
            )
    head = [name for name, _ in model.named_parameters() if is_head(model, name)]
    transposed = [_is_conv1d(layer) for name, layer in layers.items() if any(_ends_with(name, t) for t in targets)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft itself sets it right layer by layer
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)  # peft's call
        warnings.filterwarnings("ignore", category=FutureWarning)  # what peft still asks of transformers
        try:
            config = peft.LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,  # type: ignore[arg-type]
                lora_dropout=settings.dropout,
                target_modules=targets,
                fan_in_fan_out=any(transposed),
                exclude_modules=sorted({name.rpartition(".")[0] for name in head}) or None,
                modules_to_save=_modules(head) or None,
            )
            return peft.get_peft_model(model, config)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise UserError(f"peft refuses model.lora ({error}): correct it.") from error


def check_adapters(model: nn.Module, logits_of: Callable[[list[np.ndarray]], Tensor]) -> None:
    """Check, before training, that the logits depend on every adapter: noise alone would change any other.

    It uses random tokens and no example of the data. B starts at zero, so A has no gradient at first; the gradient of
    B is zero if the adapter's output, or A's output, is not used.

    Args:
        model: with adapters, whose mode is as before afterwards.
        logits_of: rows of tokens -> the model's logits.

    Raises:
        UserError: naming an adapter without a gradient.
    """
    size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    rows = [np.arange(first, first + MADE_UP, dtype=np.int32) % size for first in (0, size // 2)]
    sides = {name: p for name, p in model.named_parameters() if ".lora_B." in name and p.requires_grad}
    training = model.training
    model.eval()  # masks could hide an adapter
    try:
        found = torch.autograd.grad(logits_of(rows).square().sum(), list(sides.values()), allow_unused=True)
    finally:
        model.train(training)
    for name, gradient in zip(sides, found, strict=True):
        if gradient is None or not gradient.any():
            raise UserError(
                f"Adapter {name!r} has no effect on the logits, so noise alone would change it: leave its layer out of "
                "model.lora.targets."
            )


MADE_UP = 12
"""Tokens of a row that `check_adapters` makes up."""


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can take an adapter with a clipping rule: no heads and no tied embeddings."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    return {
        name: layer
        for name, layer in model.named_modules()
        if (isinstance(layer, nn.Linear) or _is_conv1d(layer))
        and layer.weight is not embedding
        and not is_head(model, name)
    }


def _usual_targets(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """peft's default layers for the model's type: c_attn for GPT-2, query and value for RoBERTa."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    kind = model.config.model_type  # type: ignore[union-attr]
    targets = USUAL.get(str(kind))
    if not isinstance(targets, list):
        raise UserError(f"peft has no default layers for {kind}: give model.lora.targets, some of {_ends(layers)}.")
    return targets


def _modules(head: list[str]) -> list[str]:
    """The outermost modules of these parameters: classifier, score, or bert.pooler."""
    parts = [name.split(".") for name in head]
    return sorted({".".join(p[: p.index("pooler") + 1]) if "pooler" in p else p[0] for p in parts})


def _is_conv1d(layer: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends(layers: dict[str, nn.Module]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
