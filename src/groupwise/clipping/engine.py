"""The engine: attach a partition to a model, run backward passes that clip, give the model back as it was."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from groupwise.clipping.costs import Formula, Rates, Shared
from groupwise.clipping.discovery import Layer, find_layers
from groupwise.clipping.factors import ClipRule, clip_factors, may_ask
from groupwise.clipping.gate import GroupPass, GroupState, LayerFunction, Member, Phase, Round
from groupwise.clipping.groups import build_groups
from groupwise.clipping.partition import Partition, check_partition
from groupwise.clipping.paths import check_paths
from groupwise.clipping.rules.fallback import Call, FallbackForward, FallbackRule
from groupwise.errors import UserError

Norms = Literal["bookkeeping", "ghost"]


def attach(
    model: nn.Module,
    partition: Partition,
    thresholds: float | Sequence[float] | Tensor,
    *,
    norms: Norms = "bookkeeping",
    clip_rule: ClipRule = clip_factors,
    formula: Formula = "auto",
    rates: Rates | None = None,
) -> "ClippingEngine":
    """Make backward passes of `model` clip per-example gradients group by group.

    After `engine.backward(losses)` every trainable parameter's .grad has grown by
    Σ_i g_k^(i) · min(1, C_k / ‖g_k^(i)‖), so the sum over a logical batch changes by at most C_k in group k when one
    example is added or removed. Noise and division by the batch size are the caller's (see `groupwise.privacy`).

    Args:
        model: any module whose layers take the batch as their first axis.
        partition: groups of layers: `flat`, `per_layer`, `per_block`, `by_mapping`, or your own tuple of `Group`.
        thresholds: C_k > 0, one for all groups or one each, (K,).
        norms: "bookkeeping" keeps activations and output gradients of a group until it closes (one backward pass);
            "ghost" runs backward twice and keeps nothing (one group only).
        clip_rule: (norms (B,), threshold ()) -> factors (B,) with factor · norm <= threshold.
        formula: force "gram" or "materialize" norms where a layer has both; "auto" takes the cheaper.
        rates: what this machine's arithmetic costs, for "auto"; by default measured once and kept in the cache folder.

    Raises:
        UserError: a layer that mixes examples, a parameter in no group or two, an option that cannot be clipped, bad
            thresholds.
    """
    return ClippingEngine(model, partition, thresholds, norms=norms, clip_rule=clip_rule, formula=formula, rates=rates)


class ClippingEngine:
    """What `attach` returns; also a context manager that detaches at its end."""

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        thresholds: float | Sequence[float] | Tensor,
        *,
        norms: Norms,
        clip_rule: ClipRule,
        formula: Formula,
        rates: Rates | None,
    ) -> None:
        if norms not in ("bookkeeping", "ghost"):
            raise UserError(f"norms={norms!r} is unknown: choose 'bookkeeping' or 'ghost'.")
        if norms == "ghost" and len(partition) != 1:
            raise UserError(
                f"Ghost clipping reweights whole losses, so it needs one group; {len(partition)} were given."
            )
        if formula not in get_args(Formula):
            raise UserError(f"formula={formula!r} is unknown: choose 'auto', 'gram' or 'materialize'.")
        layers = find_layers(model)
        check_partition(layers, partition)
        self._shared = Shared(formula, rates)
        self.model, self.partition, self.norms = model, partition, norms
        self.groups = build_groups(layers, partition, clip_rule, self._shared, thrifty=norms == "ghost")
        self.examples = 0
        first = self.groups[0].threshold
        self._count_at = torch.ones(len(partition), dtype=first.dtype, device=first.device)
        self._within = torch.zeros(len(partition), dtype=torch.int64, device=first.device)
        self._left_out = torch.zeros_like(self._within)
        self.squared_norms: dict[int, Tensor] = {}
        self._round: Round | None = None
        self._open: dict[int, GroupPass] = {}
        self._bypassed = False
        self._checked = False
        self._trains = {name: p.requires_grad for name, p in model.named_parameters()}
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self.set_thresholds(thresholds)
        self._patched = self._patch(layers)

    # -- thresholds and counts ------------------------------------------------------------------------------------

    @property
    def thresholds(self) -> Tensor:
        """C_k that clips, (K,)."""
        return torch.stack([group.threshold for group in self.groups])

    def set_thresholds(
        self, clip: float | Sequence[float] | Tensor, count: Sequence[float] | Tensor | None = None
    ) -> None:
        """Set the thresholds that clip and, where they differ, those that the counts are taken at; both (K,).

        Raises:
            UserError: not one finite positive number a group.
        """
        values = self._spread(clip)
        self._count_at.copy_(torch.tensor(values if count is None else self._spread(count), dtype=torch.float64))
        for group, value in zip(self.groups, values, strict=True):
            group.threshold.fill_(value)

    def _spread(self, values: float | Sequence[float] | Tensor) -> list[float]:
        numbers = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
        numbers = numbers.expand(len(self.groups)) if numbers.dim() == 0 else numbers
        if numbers.shape != (len(self.groups),):
            raise UserError(
                f"{tuple(numbers.shape)} thresholds were given for {len(self.groups)} groups: give one, or one each."
            )
        if not bool((torch.isfinite(numbers) & (numbers > 0)).all()):
            raise UserError(f"Clipping thresholds must be finite and positive; {numbers.tolist()} were given.")
        return numbers.tolist()

    @property
    def counts(self) -> Tensor:
        """b̄_k: how many examples since `reset` had ‖g_k‖ <= the count threshold, (K,) float64 on the CPU."""
        return self._within.double().cpu()

    @property
    def nonfinite(self) -> int:
        """Examples left out since `reset` because a norm was not finite (the most over groups)."""
        return int(self._left_out.max())

    @property
    def products_reused(self) -> int:
        """How often a layer took XXᵀ from the layer before, which had the same input."""
        return self._shared.products.reused

    @property
    def per_example_norms(self) -> Tensor:
        """‖g_k^(i)‖ of the last microbatch, (K, B); not private."""
        return torch.stack([self.squared_norms[k] for k in range(len(self.groups))]).clamp_min(0).sqrt()

    def reset(self) -> None:
        """Begin a logical batch: forget counts and examples (the parameters' .grad are the caller's to clear)."""
        self.examples = 0
        self._within.zero_()
        self._left_out.zero_()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What runs backward inside leaves no mark on `counts`, `nonfinite` and `examples`."""
        before = self.examples, self._within.clone(), self._left_out.clone()
        try:
            yield
        finally:
            self.examples, self._within, self._left_out = before

    # -- the backward pass ----------------------------------------------------------------------------------------

    def backward(self, losses: Tensor) -> None:
        """Add the clipped sums of one microbatch to the parameters' .grad, and its counts to `counts`.

        Args:
            losses: one loss per example, (B,); they are summed, never averaged (B is the first axis of every layer).

        Raises:
            UserError: losses of another shape; a parameter frozen or thawed since `attach`; a parameter used outside
                its layer; a trainable parameter that the losses do not reach.
        """
        self._check_losses(losses)
        self._check_trains()
        check_paths(losses, self._names)
        try:
            squares = self._ghost_norms(losses) if self.norms == "ghost" else None
            if squares is not None:
                losses = self._reweigh(losses, squares)
            else:
                self._round = Round(Phase.CLIP, losses.shape[0])
            assert self._round is not None
            _run_backward(losses)
            self._check_reached(self._round.closed)
            self._count(self._round.squared_norms)
        finally:
            self._round = None
            self._open.clear()
            self._shared.clear()
        self.examples += losses.shape[0]

    def _count(self, squared_norms: dict[int, Tensor]) -> None:
        """Count all groups at once, after the backward pass: examples within their thresholds, and those left out."""
        self.squared_norms = squared_norms
        squares = torch.stack([squared_norms[k].to(self._within.device) for k in range(len(self.groups))])
        norms = squares.clamp_min(0).sqrt_()
        self._within += (norms <= self._count_at.to(norms.dtype).unsqueeze(1)).sum(1)
        self._left_out += (~(squares < math.inf)).sum(1)

    def _ghost_norms(self, losses: Tensor) -> Tensor:
        """First pass: only squared norms, as the probe's gradient; the graph stays for the second."""
        self._round = Round(Phase.NORMS, losses.shape[0])
        group_pass = self._open.get(0)
        if group_pass is None or group_pass.probe is None:
            raise UserError("The losses do not come from the attached model: no layer of it ran with gradients on.")
        (squares,) = torch.autograd.grad(losses.sum(), group_pass.probe, retain_graph=True)
        with torch.no_grad():
            squares = squares + group_pass.cross_terms(squares)
        group_pass.entries.clear()
        return squares

    def _reweigh(self, losses: Tensor, squares: Tensor) -> Tensor:
        """Second pass: Σ_i factor_i · loss_i; examples with a norm that is not finite are left out everywhere."""
        with torch.no_grad():
            factors = self._open[0].clip(squares)
        keep = (factors != 0).to(factors.dtype)
        everyone = may_ask(keep) and bool(keep.all())
        self._round = Round(Phase.SUMS, losses.shape[0], None if everyone else keep, {0: squares})
        return torch.where(factors != 0, losses * factors.to(losses.dtype), torch.zeros_like(losses))

    def _check_losses(self, losses: Tensor) -> None:
        if losses.dim() != 1 or not losses.is_floating_point():
            raise UserError(
                f"The loss must be one value per example, a float tensor of shape (batch,); {tuple(losses.shape)} was "
                "given: use reduction='none' and reduce over everything but the batch."
            )
        if not losses.requires_grad:
            raise UserError("The losses carry no gradient: compute them with gradients on, from the attached model.")

    def _check_trains(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self._trains.get(name) != parameter.requires_grad:
                done = "thawed" if parameter.requires_grad else "frozen"
                raise UserError(f"Parameter {name!r} was {done} after attaching: detach, then attach again.")

    def _check_reached(self, closed: set[int]) -> None:
        if self._checked:
            return
        for group in self.groups:
            if group.index not in closed:
                raise UserError(
                    f"The losses reach no layer of group {group.name!r}: freeze its parameters, or use them."
                )
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise UserError(f"Parameter {name!r} trains but got no gradient: freeze it, or use it.")
        self._checked = True

    # -- how layers find their group ------------------------------------------------------------------------------

    def _patch(self, layers: tuple[Layer, ...]) -> list[nn.Module]:
        places = {member.name: (group, member) for group in self.groups for member in group.members}
        patched = []
        for layer in layers:
            if "forward" in layer.module.__dict__:
                raise UserError(
                    f"Layer {layer.name!r} has its forward replaced already: detach the other engine or wrapper first."
                )
        for layer in layers:
            group, member = places[layer.name]
            run = self._run_layer
            if isinstance(member.rule, FallbackRule):
                member.rule.bypass, run = self.bypassed, self._run_fallback
            layer.module.forward = torch.compiler.disable(partial(run, layer.module, group, member))  # type: ignore[method-assign]
            patched.append(layer.module)
        return patched

    def _run_layer(self, module: nn.Module, group: GroupState, member: Member, *args: Any, **kwargs: Any) -> Tensor:
        if self._bypassed or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        rule = member.rule
        x = rule.prepare(args[0] if args else next(iter(kwargs.values())))
        parameters = [getattr(module, name) for name in rule.parameter_names]
        x, parameters = _autocast(rule.autocast, x, [None if p is None else p.detach() for p in parameters])
        group_pass = self._pass(group, member, x)
        return LayerFunction.apply(group_pass, member, group_pass.probe, x, *parameters)

    def _run_fallback(self, module: nn.Module, group: GroupState, member: Member, *args: Any, **kwargs: Any) -> Any:
        if self._bypassed or not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        call = Call((args, kwargs))
        if not call.values:
            raise UserError(f"Layer {member.name!r} was called without a tensor, so its examples cannot be told apart.")
        parameters = [p.detach() for _, p in module.named_parameters()]
        group_pass = self._pass(group, member, call.values[0])
        receive = partial(group_pass.receive, member)
        with torch.autocast(call.values[0].device.type, enabled=False):
            outputs = FallbackForward.apply(
                member.rule, call, receive, group_pass.probe, len(call.values), *call.values, *parameters
            )
        return call.outputs.rebuild(outputs)

    def _pass(self, group: GroupState, member: Member, x: Tensor) -> GroupPass:
        """The group's open pass; a recomputation inside backward (checkpointing) joins the one that is running."""
        group_pass = self._open.get(group.index)
        if self._round is not None:
            if group_pass is None:
                raise UserError(
                    f"Layer {member.name!r} ran for the first time inside the backward pass: use checkpointing with "
                    "use_reentrant=False."
                )
            return group_pass
        if group_pass is None or group_pass.batch != x.shape[0]:
            if group_pass is not None:
                group_pass.probe = None  # a forward whose losses never came, or one with another batch size
            group_pass = GroupPass(group, x.shape[0], x.device, lambda: self._round)
            self._open[group.index] = group_pass
        group_pass.calls[member.name] += 1
        return group_pass

    # -- leaving no trace -----------------------------------------------------------------------------------------

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Inside, the model runs as if nothing were attached (gradients are then plain and unclipped)."""
        before, self._bypassed = self._bypassed, True
        try:
            yield
        finally:
            self._bypassed = before

    def detach(self) -> None:
        """Give the model back as it was."""
        for module in self._patched:
            module.__dict__.pop("forward", None)
        self._patched = []
        self._open.clear()

    def __enter__(self) -> "ClippingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _run_backward(losses: Tensor) -> None:
    try:
        losses.sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise UserError(
                "A tensor that a layer keeps for its backward pass was changed in place (by ReLU(inplace=True) after "
                f"a WSConv2d, say): use operations that are not in place. torch says: {str(error).splitlines()[0]}"
            ) from error
        raise


def _autocast(kind: str, x: Tensor, parameters: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """What autocast would do to a layer's inputs, so that the rule itself can run without it."""
    device = x.device.type
    if kind == "keep" or not torch.is_autocast_enabled(device):
        return x, parameters
    dtype = torch.get_autocast_dtype(device) if kind == "lower" else torch.float32
    return x.to(dtype), [None if p is None else p.to(dtype) for p in parameters]
