"""Says which layers of a transformers model are cut how, or refuses the model by the name of a layer.

A layer is cut by its outputs (columns) and the next by its inputs (rows), with heads and hidden units in between whole:
q, k, v and the projection of attention; the two or three matrices of an MLP. What transformers itself knows of that is
in a model's `base_model_tp_plan`; GPT-2 and the BERT family, which have none, are in `OWN`. Embedding and head are cut
by the vocabulary. All else is whole in every process.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from groupwise.errors import UserError

Way = Literal["columns", "rows", "table", "head"]
_BERT: dict[str, tuple[Way, int]] = {
    "encoder.layer.*.attention.self.query": ("columns", 1),
    "encoder.layer.*.attention.self.key": ("columns", 1),
    "encoder.layer.*.attention.self.value": ("columns", 1),
    "encoder.layer.*.attention.output.dense": ("rows", 1),
    "encoder.layer.*.intermediate.dense": ("columns", 1),
    "encoder.layer.*.output.dense": ("rows", 1),
}
OWN: dict[str, dict[str, tuple[Way, int]]] = {
    "gpt2": {
        "h.*.attn.c_attn": ("columns", 3),
        "h.*.attn.c_proj": ("rows", 1),
        "h.*.mlp.c_fc": ("columns", 1),
        "h.*.mlp.c_proj": ("rows", 1),
    },
    "bert": _BERT,
    "roberta": _BERT,
}
"""Model type → layers below its base model → the way, and how many matrices one holds side by side (q, k and v)."""
THEIRS: dict[str, Way] = {"colwise": "columns", "rowwise": "rows"}
"""What of transformers' own plans has a gradient that is this process's alone."""
WIDTHS = ("num_heads", "split_size")
"""What GPT-2's attention has in numbers of its own heads."""


@dataclass(frozen=True)
class Cut:
    """A layer and the way in which its tensors are cut."""

    name: str
    module: nn.Module
    way: Way
    pieces: int = 1
    """How many matrices stand side by side in one, each of which is cut."""

    def axis(self, parameter: str) -> int | None:
        """The axis that "weight" or "bias" is cut along; None for what the first process has whole."""
        turned = type(self.module).__name__ == "Conv1D"  # its weight is (d, p)
        if self.way == "rows":
            return None if parameter == "bias" else int(not turned)
        return 0 if parameter == "bias" else int(turned)


def cuts_of(model: nn.Module, parts: int) -> list[Cut]:
    """The layers of a transformers model that are cut, in its own order.

    Raises:
        UserError: a model that is in no table; heads or widths that `parts` does not divide; adapters; a layer that
            trains its bias alone.
    """
    named, base = dict(model.named_modules()), getattr(model, "base_model", model)
    prefix = next((name for name, module in named.items() if module is base), "")
    prefix = f"{prefix}." if prefix else ""
    table = _table(model, named)
    cuts = []
    for name, module in named.items():
        below = name.removeprefix(prefix)
        way, pieces = next((found for pattern, found in table.items() if fnmatchcase(below, pattern)), ("", 1))
        if way:
            cuts.append(Cut(name, module, way, pieces))  # type: ignore[arg-type]
    cuts += _vocabulary(model, named)
    _check_heads(model, cuts, parts)
    for cut in cuts:
        _check(cut, parts)
    return cuts


def set_widths(cut: Cut, model: nn.Module, parts: int) -> None:
    """Tell a layer that was cut, and the module around it, how wide it is now."""
    module: Any = cut.module
    if type(module).__name__ == "Conv1D":
        module.nx, module.nf = module.weight.shape
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    if cut.pieces > 1:
        around = model.get_submodule(cut.name.rpartition(".")[0])
        for width in WIDTHS:
            setattr(around, width, getattr(around, width) // parts)


def _table(model: Any, named: Mapping[str, nn.Module]) -> dict[str, tuple[Way, int]]:
    adapter = next((name for name in named if "lora_" in name), None)
    if adapter is not None:
        raise UserError(
            f"parallel.kind=tensor has no way to cut the adapter {adapter!r}: use model.trains=all, or "
            "parallel.kind=ddp."
        )
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind in OWN:
        return OWN[kind]
    theirs: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    for pattern, way in theirs.items():
        if way not in THEIRS and any(fnmatchcase(name, f"*{pattern}") for name in named):
            raise UserError(
                f"parallel.kind=tensor cannot cut layer {pattern!r} of {kind}, which transformers plans as {way}, so "
                "that no process knows its gradient alone: use parallel.kind=ddp or fsdp."
            )
    if not theirs:
        layer = next((name for name, module in named.items() if module._parameters), "")
        raise UserError(
            f"parallel.kind=tensor does not know how to cut layer {layer!r} of {kind or type(model).__name__}: use "
            "GPT-2, BERT, RoBERTa or a model that transformers has a base_model_tp_plan for, or parallel.kind=ddp."
        )
    return {pattern: (THEIRS[way], 1) for pattern, way in theirs.items() if way in THEIRS}


def _vocabulary(model: Any, named: Mapping[str, nn.Module]) -> Iterator[Cut]:
    """The embedding, and the head of a language model; both are left whole where one is of a type of its own."""
    names = {id(module): name for name, module in named.items()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(table) is not nn.Embedding or table.max_norm is not None:
        return
    if head is None:
        yield Cut(names[id(table)], table, "table")
    elif type(head) is nn.Linear:
        yield Cut(names[id(table)], table, "table")
        yield Cut(names[id(head)], head, "head")


def _check_heads(model: Any, cuts: list[Cut], parts: int) -> None:
    text = model.config.get_text_config()
    attention = next((cut.name for cut in cuts if cut.way == "columns"), "")
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None)
        if isinstance(heads, int) and heads % parts:
            raise UserError(
                f"parallel.ranks={parts} does not divide the {heads} heads ({key}) of layer {attention!r}: give a "
                "number of processes that does."
            )


def _check(cut: Cut, parts: int) -> None:
    kind = type(cut.module).__name__
    if kind not in ("Linear", "Conv1D", "Embedding"):
        raise UserError(
            f"parallel.kind=tensor cannot cut layer {cut.name!r} ({kind}): it cuts nn.Linear, Conv1D and nn.Embedding; "
            "use parallel.kind=ddp."
        )
    weight, bias = cut.module.get_parameter("weight"), cut.module._parameters.get("bias")
    axis = cut.axis("weight")
    assert axis is not None
    width = weight.shape[axis] // cut.pieces
    if cut.way in ("columns", "rows") and width % parts:
        raise UserError(
            f"parallel.ranks={parts} does not divide layer {cut.name!r}, which is {width} wide: give a number of "
            "processes that does."
        )
    if bias is not None and bias.requires_grad and not weight.requires_grad:
        raise UserError(
            f"Layer {cut.name!r} trains its bias alone, which parallel.kind=tensor does not clip: use "
            "parallel.kind=ddp, or train the weight too."
        )
