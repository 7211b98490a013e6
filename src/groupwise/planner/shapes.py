"""Makes the planned model on the meta device, from a known name or a folder, with its adapters."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupwise.config.schema import LoraConfig
from groupwise.errors import UserError, reason, unknown
from groupwise.models.language import untie
from groupwise.models.trainable import add_adapters
from groupwise.pipeline.model_parts import check_known
from groupwise.torchvision_import import import_torchvision_first


def _opt(width: int) -> dict[str, int]:
    """OPT's configuration does not compute the width of its feed-forward layers, 4d, as the others do."""
    return {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Brown et al., 2020, table 2.1, as a GPT-2, which has the same blocks (in GPT-3 every second one was sparse).
    "gpt3_175b": ("gpt2", {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}),
    # Zhang et al., 2022, table 1.
    "opt_66b": ("opt", {"num_hidden_layers": 64, "num_attention_heads": 72, **_opt(9216)}),
    "opt_175b": ("opt", {"num_hidden_layers": 96, "num_attention_heads": 96, **_opt(12288)}),
    # Radford et al., 2019, table 2.
    "gpt2_xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    # Touvron et al., 2023, table 2.
    "llama_7b": ("llama", {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}),
}
NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "activation_dropout")


def configuration(name: str) -> Any:
    """Return transformers' configuration for a name of `SHAPES`, or a folder with a config.json, without dropout.

    Raises:
        UserError: an unknown name, or a folder that transformers cannot read.
    """
    import_torchvision_first()
    from transformers import AutoConfig

    if name in SHAPES:
        kind, shape = SHAPES[name]
        config = AutoConfig.for_model(kind, **shape)
    elif (Path(name) / "config.json").is_file():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"transformers cannot read the config.json of model={name} ({reason(error)}).") from error
    else:
        raise unknown("shape or folder with a config.json named", name, SHAPES)
    for key in NO_DROPOUT:
        if getattr(config, key, 0):
            setattr(config, key, 0.0)
    return config


def build(config: Any, rank: int, dtype: str, device: str = "meta") -> nn.Module:
    """Return the causal language model of a configuration, in training mode.

    Args:
        config: from `configuration`.
        rank: rank of float32 adapters on frozen weights; 0 trains all parameters.
        dtype: dtype of the model's weights, by torch's name.
        device: "meta" allocates no memory.

    Raises:
        UserError: as `check_known`.
    """
    check_known(config.model_type)
    import_torchvision_first()
    from transformers import AutoModelForCausalLM

    made = partial(AutoModelForCausalLM.from_config, dtype=getattr(torch, dtype))
    with torch.device(device):
        try:
            model = made(deepcopy(config), attn_implementation="sdpa")
        except ValueError:  # it has no such attention
            model = made(deepcopy(config), attn_implementation="eager")
        if rank:
            model = add_adapters(model, LoraConfig(rank=rank, alpha=float(rank)))
        else:
            untie(model)  # the first and the last stage cannot share a trained weight
    return model.train()
