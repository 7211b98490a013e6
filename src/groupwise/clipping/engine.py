"""Attaches a partition to a model and runs forward and backward passes that clip each group."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from groupwise.clipping.calls import LayerCalls
from groupwise.clipping.checks import Attached, LossesOf, check_losses, check_model, check_options, check_rule
from groupwise.clipping.clip_plan import ClipPlan, UntracedCall
from groupwise.clipping.factors import ClipRule, Factors, clip_factors
from groupwise.clipping.group_pass import clip_factors_of, close_rest
from groupwise.clipping.groups import build_groups
from groupwise.clipping.norm_methods import Formula, NormMethods, Rates
from groupwise.clipping.partition import Partition, check_partition, find_layers
from groupwise.clipping.passes import UNNAMED, ClippedGradients, Note, Pass, Passes, Phase
from groupwise.clipping.patching import Patches
from groupwise.clipping.precision import full_float32, no_autocast
from groupwise.clipping.runs import Draw, Runs
from groupwise.clipping.thresholds_and_counts import ThresholdsAndCounts
from groupwise.clipping.trace import TRACED, trace
from groupwise.clipping.unchanged import Generators, moved_parameters, unchanged
from groupwise.errors import UserError

Norms = Literal["bookkeeping", "ghost"]


class ClippingEngine(ThresholdsAndCounts):
    """Makes backward passes of `model` clip per-example gradients group by group, until it is detached.

    `engine.backward(losses)` adds Σ_i g_k^(i) · min(1, C_k / ‖g_k^(i)‖) to the .grad of every trainable parameter of
    group k. So adding or removing one example changes group k's sum over a logical batch by at most C_k. The caller
    adds the noise and divides by the batch size (see `groupwise.privacy`). As a context manager, it detaches on exit.

    Args:
        model: any module whose inputs have one batch axis.
        partition: groups of layers: `flat`, `per_layer`, `per_block`, `by_mapping`, or your own tuple of `Group`.
        thresholds: C_k > 0, one for all groups or one per group, (K,).
        norms: "bookkeeping" keeps activations and output gradients of a group until its clip factors are known (one
            backward pass); "ghost" runs backward twice and keeps nothing (one group only).
        clip_rule: (norms (K, B), thresholds (K, 1)) -> factors (K, B) with factor · norm <= threshold.
        formula: force "gram" or "materialize" norms where a layer has both; "auto" takes the cheaper.
        rates: how fast the device computes, for "auto"; None takes the rates of its type (`norm_methods.RATES`).
        direct: layers return their parameters' clipped sums to autograd, so that parameters may be sharded (FSDP2).
            This needs one group per layer, or norms="ghost", and no shared parameter.

    Raises:
        UserError: a layer mixes examples, or cannot be `direct`; a parameter is in no group or in two; an option that
            cannot be clipped; invalid thresholds.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        thresholds: float | Sequence[float] | Tensor,
        *,
        norms: Norms = "bookkeeping",
        clip_rule: ClipRule = clip_factors,
        formula: Formula = "auto",
        rates: Rates | None = None,
        direct: bool = False,
    ) -> None:
        check_options(norms, partition, formula)
        check_rule(clip_rule)
        check_model(model)
        layers = find_layers(model)
        check_partition(layers, partition)
        methods = NormMethods(formula, rates, save_memory=norms == "ghost")
        super().__init__(model, partition, *build_groups(layers, partition, clip_rule, methods, direct))
        self.norms = norms
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._passes = Passes(ClippedGradients({} if direct else trained), self._table.device)
        self.plan = ClipPlan()
        """The layout of each layer call's input, as found by `trace`."""
        self._checked = False
        self._into = None if direct else [self._passes.anchor, *trained.values()]
        """The tensors for which autograd computes gradients: the anchor, and parameters, to detect a bypass."""
        self._attached = Attached(model, shards=direct)
        self._direct = direct
        self.set_thresholds(thresholds)
        calls = LayerCalls(self._passes, methods)
        self._patches = Patches(model, layers, self.groups, calls, direct)

    def reset(self) -> None:
        """Begin a logical batch: reset counts and drop pending microbatches. The caller clears .grad.

        Raises a `UserError` if a parameter was replaced, frozen or cast since `attach`.
        """
        self._attached.check_same()
        self._passes.forget()
        self.examples, self._clipped, self._read, self._unmasked = 0, None, None, False
        self._totals.zero_()

    # -- the plan -------------------------------------------------------------------------------------------------

    def trace(self, losses_of: LossesOf, examples: Sequence[int]) -> ClipPlan:
        """Find the batch axis of every layer's input in a few forward passes, and add it to `plan`.

        Random generators and buffers are restored afterwards.

        Args:
            losses_of: indices of examples -> their losses, (n,), computed by the model.
            examples: the first six are used. If lengths differ, put the longest first.

        Returns:
            The plan, in which later passes look up layer calls.

        Raises:
            UserError: a layer mixes or reorders the examples, or its number of rows depends on the data.
        """
        with nullcontext() if self._direct else moved_parameters(self.model):  # the caller reshards, and moves shards
            return self._trace(losses_of, list(dict.fromkeys(examples))[:TRACED])

    def _trace(self, losses_of: LossesOf, examples: Sequence[int]) -> ClipPlan:
        with unchanged(self.model) as generators:
            runs = Runs(self.model, losses_of, generators)

            def run(rows: list[int], note: Note) -> tuple[Tensor, list[Draw]]:
                with (
                    self._patches.installed(),
                    self._passes.forward(len(rows), self.plan, note=note),
                    runs.drawing() as draws,
                ):
                    return runs.losses(rows).detach(), draws.taken

            self.plan = self.plan.joined(trace(run, runs, examples))
        return self.plan

    # -- one microbatch -------------------------------------------------------------------------------------------

    def clip(self, losses_of: LossesOf, examples: Sequence[int]) -> Tensor:
        """Run a microbatch forward and backward: `losses`, then `backward`.

        Returns:
            The losses, (n,), detached.
        """
        losses = self.losses(losses_of, examples)
        self.backward(losses)
        return losses.detach()

    def losses(self, losses_of: LossesOf, examples: Sequence[int], rewind: Callable[[], None] | None = None) -> Tensor:
        """The losses of a microbatch, (n,), for `backward`. A layer call that is not in the plan is traced once, on
        these examples; the dropout masks are the same as without the trace.

        Args:
            losses_of: indices of examples -> one loss for each of them, (n,), computed by the model.
            examples: the microbatch.
            rewind: resets the default generators to their present state; None saves that state here.

        Raises:
            UserError: as `trace` does.
        """
        rewind = rewind or Generators((self._table.device,)).standing()
        try:
            with self.forward(len(examples)):
                return losses_of(examples)
        except UntracedCall:
            if self._direct:  # a trace would keep the other processes waiting
                raise
        known, self.plan = self.plan, ClipPlan()
        try:
            self._trace(losses_of, examples)
            rewind()
            with self.forward(len(examples)):
                return losses_of(examples)
        finally:
            self.plan = known.joined(self.plan)

    @contextmanager
    def forward(self, examples: int, microbatch: Hashable = UNNAMED) -> Iterator[None]:
        """Inside, the model runs forward on B examples with clipping; pass its losses to `backward`.

        Args:
            examples: B.
            microbatch: a name, if several forward passes run before their backward passes (`backward_of`).

        Raises:
            UserError: called inside another pass.
        """
        with self._patches.installed(), self._passes.forward(examples, self.plan, microbatch):
            yield

    def backward(self, losses: Tensor, present: Tensor | None = None) -> None:
        """Add the clipped sums of one microbatch to the parameters' .grad, and its counts to `counts`.

        Args:
            losses: one loss per example, (B,), of the last `forward`; they are summed, never averaged.
            present: (B,), False for filler rows, whose losses were multiplied by 0 and whose norms are not counted.

        Raises:
            UserError: losses of another shape; a parameter frozen or unfrozen since `attach`, or used outside its
                layer; a trainable parameter that the losses do not depend on.
        """
        ghost = self.norms == "ghost"
        with self._backward("norms" if ghost else "clip") as running:
            check_losses(losses, running.examples)
            if self._direct or not self._checked:  # later, a bypass shows as a .grad that autograd itself has set
                self._attached.check_paths(losses)
            if ghost:
                torch.autograd.grad(losses.sum(), self._passes.anchor, retain_graph=True, allow_unused=True)
                close_rest(running)
                if 0 not in running.squared_norms:
                    raise UserError(
                        "The losses do not come from the model: none of its layers ran with gradients enabled."
                    )
                running.begin_sums(clip_factors_of(self.groups, [running.squared_norms[0]])[0])
            losses.sum().backward(inputs=self._into)  # the groups add the clipped sums to .grad
            self._check_reached(running)
            self._count(running.squared_norms, running.examples, present)

    @contextmanager
    def _backward(self, phase: Phase, microbatch: Hashable = UNNAMED) -> Iterator[Pass]:
        """A backward pass runs inside; layers report to their groups."""
        self._attached.check_same()
        with self._passes.backward(phase, microbatch) as running, full_float32(), no_autocast(self._table.device.type):
            self._begin_clipping()
            # Layers are patched here too, because activation checkpointing runs them again.
            with self._passes.gradients.collected(), self._patches.installed():
                yield running

    def check_output(self, output: Tensor) -> None:
        """Check a forward pass's output (any shape): no parameter's gradient may bypass its group.

        `backward` checks this itself. A pipeline runs the same code on every microbatch, so it calls this once.

        Raises:
            UserError: naming the parameter, as `backward` does.
        """
        self._attached.check_same()
        self._attached.check_paths(output)

    @contextmanager
    def backward_of(self, microbatch: Hashable, absent: int = 0) -> Iterator[None]:
        """Clip and count a backward pass that the caller runs inside, from any output of `forward(…, microbatch)`.

        The outputs must add up to Σ_i loss_i over the rows i of the batch, as in `backward`.

        Args:
            microbatch: the name that was given to `forward`; it may be used again afterwards.
            absent: how many of its last examples are filler rows: their losses have weight 0, and they are not
                counted.

        Raises:
            UserError: no such forward pass; called inside another backward pass; a group or parameter that the backward
                pass did not reach; ghost norms, which need two passes.
        """
        if self.norms == "ghost":
            raise UserError("norms='ghost' takes two backward passes: use norms_of, then sums_of.")
        with self._backward("clip", microbatch) as running:
            yield
            self._check_reached(running)
            present = running.examples - absent
            self._count({k: squares[:present] for k, squares in running.squared_norms.items()}, present)

    @contextmanager
    def norms_of(self, microbatch: Hashable) -> Iterator[None]:
        """A backward pass inside computes only `squared_norms[k]`, ‖g_k^(i)‖², (B,): no parameter gets a gradient.

        It frees the graph, so `sums_of` needs another forward pass. Nothing is counted (see `count_norms`).

        Raises:
            UserError: no such forward pass; called inside another backward pass; a group that was not reached.
        """
        with self._backward("norms", microbatch) as running:
            yield
            close_rest(running)
            self._attached.check_groups(self.groups, running)
            self.squared_norms = running.squared_norms

    @contextmanager
    def sums_of(self, microbatch: Hashable, factors: Tensor | None = None) -> Iterator[None]:
        """A backward pass inside adds Σ_i factor_i · ∂loss_i to .grad. Pass unweighted losses; nothing is counted.

        Args:
            microbatch: the name that was given to `forward`.
            factors: (B,), as from `factors`; rows with factor 0 are left out, even if they hold NaN. None: all 1.

        Raises:
            UserError: no such forward pass; called inside another backward pass; a parameter that was not reached;
                several groups.
        """
        if len(self.groups) != 1:
            raise UserError(f"sums_of is for one group, and this engine has {len(self.groups)}: use backward_of.")
        with self._backward("sums", microbatch) as running:
            running.factors = None if factors is None else Factors.of(factors)
            yield
            self._check_reached(running)

    def _check_reached(self, running: Pass) -> None:
        close_rest(running)
        self._attached.check_groups(self.groups, running)
        self._passes.gradients.check()
        self._checked = True

    def detach(self) -> None:
        """Drop pending microbatches. The model itself is unchanged outside of passes."""
        self._passes.forget()

    def __enter__(self) -> "ClippingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


attach = ClippingEngine
"""The engine's usual name: `attach(model, partition, thresholds)`."""
