"""Finds the parts of a model: the modules before its blocks, the blocks, and the modules after them."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import nn

from groupwise.errors import UserError


@dataclass(frozen=True)
class Family:
    """The names of a causal language model's parts in transformers. All parts but `body` are inside `body`.

    Args:
        body: the module that runs the blocks.
        tokens: token embedding.
        blocks: list of blocks.
        norm: after the last block.
        positions: table of positions, which are added to the token embedding; each stage computes rotary ones itself.
        dropout: between the embedding and the first block.
        project_in: from the embedding's width to that of the blocks.
        project_out: from the blocks' width back to the embedding's.
    """

    body: str
    tokens: str
    blocks: str
    norm: str
    positions: str = ""
    dropout: str = ""
    project_in: str = ""
    project_out: str = ""


FAMILIES = {
    **dict.fromkeys(("gpt2", "gpt_neo"), Family("transformer", "wte", "h", "ln_f", positions="wpe", dropout="drop")),
    "gptj": Family("transformer", "wte", "h", "ln_f", dropout="drop"),
    "gpt_neox": Family("gpt_neox", "embed_in", "layers", "final_layer_norm", dropout="emb_dropout"),
    "opt": Family(
        "model.decoder",
        "embed_tokens",
        "layers",
        "final_layer_norm",
        positions="embed_positions",
        project_in="project_in",
        project_out="project_out",
    ),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "gemma", "gemma2"), Family("model", "embed_tokens", "layers", "norm")
    ),
}
"""model_type of transformers → the names of the parts."""


@dataclass(frozen=True)
class ModelParts:
    """The parts of one model.

    Args:
        entry: modules that only the first stage needs.
        blocks: in their order.
        exit: modules that only the last stage needs.
        network: the model without peft's wrapper.
        body: the module in it that runs the blocks.
        family: the names of its parts.
    """

    entry: tuple[nn.Module, ...]
    blocks: tuple[nn.Module, ...]
    exit: tuple[nn.Module, ...]
    network: Any
    body: Any
    family: Family

    @property
    def parts(self) -> list[tuple[nn.Module, ...]]:
        """Entry, each block, exit: n + 2 of them for n blocks."""
        return [self.entry, *((block,) for block in self.blocks), self.exit]


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts of a causal language model, bare or with peft's adapters inside; raises as `check_known`."""
    network: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    check_known(getattr(getattr(network, "config", None), "model_type", type(network).__name__))
    family = FAMILIES[network.config.model_type]
    head = network.get_output_embeddings()
    body: Any = reduce(getattr, family.body.split("."), network)
    entry = (getattr(body, name, None) for name in (family.tokens, family.positions, family.project_in))
    exit_ = (getattr(body, name, None) for name in (family.norm, family.project_out))
    blocks = tuple(getattr(body, family.blocks))
    return ModelParts(tuple(filter(None, entry)), blocks, (*filter(None, exit_), head), network, body, family)


def check_known(model_type: str) -> None:
    """Raise a `UserError` for a model_type that is not in `FAMILIES`."""
    if model_type not in FAMILIES:
        raise UserError(f"A {model_type} cannot be split into stages: give a model of type {', '.join(FAMILIES)}.")
