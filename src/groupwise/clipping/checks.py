"""Checks that no gradient bypasses clipping, that the losses reach every group, and that no parameter was replaced.

A parameter's gradient may come from its group (or from a layer that clips by itself) and from nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from groupwise.clipping.calls import LayerFunction
from groupwise.clipping.factors import ClipRule
from groupwise.clipping.groups import ClippingGroup
from groupwise.clipping.norm_methods import Formula
from groupwise.clipping.partition import Partition
from groupwise.clipping.passes import Pass, refuse_bypass
from groupwise.clipping.per_example import PerExample
from groupwise.errors import UserError

LossesOf = Callable[[Sequence[int]], Tensor]
"""A function of the indices of n examples that returns their losses, (n,), each computed from its own example alone."""


def check_options(norms: str, partition: Partition, formula: str) -> None:
    """Raise a `UserError` for options that are unknown, or cannot be combined."""
    if norms not in ("bookkeeping", "ghost"):
        raise UserError(f"norms={norms!r} is unknown: choose 'bookkeeping' or 'ghost'.")
    if norms == "ghost" and len(partition) != 1:
        raise UserError(
            f"Ghost clipping has one factor per example, so it needs one group; {len(partition)} were given."
        )
    if formula not in get_args(Formula):
        raise UserError(f"formula={formula!r} is unknown: choose 'auto', 'gram' or 'materialize'.")


def check_rule(rule: ClipRule) -> None:
    """Raise a `UserError` if a clip factor exceeds threshold / norm, or depends on other norms, on a grid of norms."""
    with _disable_current_modes():  # fake tensors, which estimate memory, have no values
        thresholds = torch.tensor([[1e-3], [1.0], [1e3]], dtype=torch.float64)
        norms = thresholds * torch.logspace(-9, 9, 91, dtype=torch.float64)
        factors, alone = rule(norms, thresholds), rule(norms[:, :45], thresholds)
        within = (factors >= 0) & (factors * norms <= thresholds * (1 + 1e-6))  # False for NaN
        holds = bool(within.all()) and torch.allclose(factors[:, :45], alone, rtol=1e-6)
    if not holds:
        raise UserError(
            "The clip rule must return a factor between 0 and threshold / norm for each norm, whatever the other norms "
            "are, and does not: correct it, as the noise hides no larger gradients."
        )


def check_model(model: nn.Module) -> None:
    """Raise a `UserError` for a model that is wrapped in DataParallel or DistributedDataParallel."""
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise UserError(
            f"The model is wrapped in {type(model).__name__}, which averages gradients before the noise: attach to "
            "model.module, and add up .grad over processes (make_private does, with ranks=Ranks())."
        )


def check_losses(losses: Any, examples: int, traced: bool = False) -> None:
    """Raise a `UserError` for losses that are not one float per example, or have no gradient (allowed if `traced`)."""
    if not isinstance(losses, Tensor):
        raise UserError(f"The losses are a {type(losses).__name__}: return a tensor with one loss for each example.")
    if losses.dim() != 1 or not losses.is_floating_point():
        model_s_own = "" if losses.dim() else " A Hugging Face model's own .loss is a mean: compute it from the logits."
        raise UserError(
            f"The loss must be one value per example, a float tensor of shape (batch,); {losses.dtype} of shape "
            f"{tuple(losses.shape)} was given: use reduction='none' and reduce over everything but the batch."
            f"{model_s_own}"
        )
    if isinstance(losses, PerExample):
        raise UserError(
            f"The losses have no batch axis, coming from {losses.origin.label[0].lower()}{losses.origin.label[1:]}: "
            "compute each example's loss from its own inputs."
        )
    if losses.shape != (examples,):
        raise UserError(
            f"{examples} examples gave losses of shape {tuple(losses.shape)}: return one loss for each of them "
            "(reduction='none'), and of no others."
        )
    if not (losses.requires_grad or traced):
        raise UserError("The losses carry no gradient: compute them with gradients enabled, from the given model.")


class Attached:
    """The parameters of a model as they were when an engine was attached, and checks that they are clipped.

    Args:
        shards: FSDP2 swaps parameters between shards and whole tensors, so only `requires_grad` is compared.
    """

    def __init__(self, model: nn.Module, shards: bool) -> None:
        self._shards = shards
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._modules = [(f"{name}.".lstrip("."), module._parameters) for name, module in model.named_modules()]
        self._known = self._now()

    def _now(self) -> dict[str, tuple[Any, ...]]:
        """For each parameter its identity, shape and dtype, or only `requires_grad` if those may change."""
        return {
            prefix + local: (id(p), p.shape, p.dtype) if p.requires_grad and not self._shards else (p.requires_grad,)
            for prefix, parameters in self._modules
            for local, p in parameters.items()
            if p is not None
        }

    def check_same(self) -> None:
        """Raise a `UserError` if a parameter was added, removed, replaced, frozen, unfrozen or cast."""
        known, now = self._known, self._now()
        if now != known:
            name = next(name for name in (*known, *now) if known.get(name) != now.get(name))
            raise UserError(
                f"Parameter {name!r} was added, removed, replaced, frozen, unfrozen or cast after clipping began: do "
                "that before make_private (or attach), or call detach() and then make_private again; to change its "
                "values, copy them in place."
            )

    def check_groups(self, groups: Sequence[ClippingGroup], running: Pass) -> None:
        """Raise a `UserError` that names a group that the backward pass did not reach, or a layer if layers return
        their sums themselves; see also `Pass.check_again`."""
        running.check_again()
        missing = []
        for group in groups:
            silent = [member for member in group.members if group.direct and member.name not in running.reported]
            found = running.groups.get(group.index)
            if silent or found is None or not found.received:
                member = silent[0] if silent else group.members[0]
                what = f"layer {member.name!r}" if silent else f"layer of group {group.name!r}"
                name = next(self._names[id(parameter)] for parameter in member.parameters if parameter is not None)
                missing.append(f"{what} (parameter {name!r} and the like)")
        if missing:
            more = f", nor {len(missing) - 3} others" if missing[3:] else ""
            raise UserError(
                f"The losses reach no {', no '.join(missing[:3])}{more}: freeze their parameters, or use them in every "
                "forward pass (multiplied by 0, if they should have no effect). After replacing a layer call detach(), "
                "and then make_private (or attach) again."
            )

    def check_paths(self, output: Tensor) -> None:
        """Walk the autograd graph of an output (the losses, say): it may reach parameters only through clipped layers.

        A parameter that a module uses directly (say `F.linear(x, other.weight)`) would get an unclipped gradient on top
        of the clipped sum. Raises a `UserError` that names it, and for reentrant checkpointing, whose graph cannot be
        walked.
        """
        seen: set[Any] = set()
        stack: list[tuple[Any, str]] = [(output.grad_fn, "the loss")]
        while stack:
            node, after = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            kind, ours = node.name(), getattr(node, "_forward_cls", None)
            if kind == "CheckpointFunctionBackward":
                raise UserError(
                    "Reentrant checkpointing runs a part of the model inside the backward pass, where its parameters "
                    "cannot be clipped: use checkpointing with use_reentrant=False."
                )
            variable = getattr(node, "variable", None)
            if isinstance(variable, PerExample):
                raise UserError(
                    f"{variable.origin.label} goes into {after.removesuffix('Backward')}, a torch.autograd.Function, "
                    "whose gradient cannot be split by example: use plain operations instead, or freeze it."
                )
            whole = self._shards and isinstance(variable, nn.Parameter)  # as its layer runs: its name is unknown
            if variable is not None and (whole or id(variable) in self._names):
                refuse_bypass(self._names.get(id(variable), f"of shape {tuple(variable.shape)}"))
            if isinstance(variable, nn.Parameter):
                raise UserError(
                    f"The losses use a trainable parameter of shape {tuple(variable.shape)} that is not the model's, "
                    "so its gradient is not clipped: make it part of the model first, or freeze it."
                )
            following = node.next_functions[:2] if ours is LayerFunction else node.next_functions  # anchor and input
            stack.extend((next_node, kind) for next_node, _ in following)
