"""Attaches a partition to a model, runs backward passes that clip, and gives the model back as it was."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from groupwise.clipping.autograd import run_backward
from groupwise.clipping.calls import LayerCalls
from groupwise.clipping.checks import (
    Attached,
    check_groups,
    check_losses,
    check_model,
    check_options,
    check_paths,
)
from groupwise.clipping.clip_plan import ClipPlan, UntracedCall
from groupwise.clipping.factors import ClipRule, Factors, clip_factors
from groupwise.clipping.group_pass import total_squares
from groupwise.clipping.groups import build_groups, clip_factors_of
from groupwise.clipping.norm_methods import Formula, NormMethods, Rates
from groupwise.clipping.partition import Partition, check_partition, find_layers
from groupwise.clipping.passes import NOT_NAMED, ClippedGradients, Note, Pass, Passes, Phase
from groupwise.clipping.patching import Patches
from groupwise.clipping.precision import full_float32, no_autocast
from groupwise.clipping.runs import Runs
from groupwise.clipping.thresholds_and_counts import ThresholdsAndCounts
from groupwise.clipping.trace import TRACED, trace
from groupwise.clipping.unchanged import Generators, moved_parameters, unchanged
from groupwise.errors import UserError

Norms = Literal["bookkeeping", "ghost"]


class ClippingEngine(ThresholdsAndCounts):
    """Makes backward passes of `model` clip per-example gradients group by group, until it is detached.

    After `engine.backward(losses)` every trainable parameter's .grad has grown by
    Σ_i g_k^(i) · min(1, C_k / ‖g_k^(i)‖), so the sum over a logical batch changes by at most C_k in group k when one
    example is added or removed. Noise and division by the batch size are the caller's (see `groupwise.privacy`).
    It is a context manager as well, which detaches at its end.

    Args:
        model: any module whose inputs hold the batch on one axis.
        partition: groups of layers: `flat`, `per_layer`, `per_block`, `by_mapping`, or your own tuple of `Group`.
        thresholds: C_k > 0, one for all groups or one each, (K,).
        norms: "bookkeeping" keeps activations and output gradients of a group until it closes (one backward pass);
            "ghost" runs backward twice and keeps nothing (one group only).
        clip_rule: (norms (K, B), thresholds (K, 1)) -> factors (K, B) with factor · norm <= threshold.
        formula: force "gram" or "materialize" norms where a layer has both; "auto" takes the cheaper.
        rates: what a device's arithmetic costs, for "auto"; None takes those of its kind (`norm_methods.RATES`).
        direct: layers return their parameters' gradients themselves, so that parameters may be shards (FSDP2). It takes
            one group a layer, or norms="ghost", and no shared parameter.

    Raises:
        UserError: a layer that mixes examples, a parameter in no group or two, an option that cannot be clipped, bad
            thresholds, a layer that cannot be `direct`.
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
        check_model(model)
        layers = find_layers(model)
        check_partition(layers, partition)
        methods = NormMethods(formula, rates, save_memory=norms == "ghost")
        super().__init__(model, partition, *build_groups(layers, partition, clip_rule, methods, direct))
        self.norms = norms
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._passes = Passes(ClippedGradients({} if direct else trained))
        self._checked = False
        self._into = None if direct else [*(group.anchor for group in self.groups), *trained.values()]
        """What gets a gradient: groups, which clip it, and parameters, of which it is refused."""
        self._attached = Attached(model, shards=direct)
        self._names = {id(p): name for name, p in trained.items()}
        self._direct = direct
        self.set_thresholds(thresholds)
        calls = LayerCalls(self._passes, methods)
        self._patches = Patches(model, layers, self.groups, calls, direct)

    def reset(self) -> None:
        """Begin a logical batch: forget counts, examples and waiting microbatches (.grad is the caller's to clear)."""
        self._passes.forget()
        self._reset_counts()

    # -- the plan -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ClipPlan:
        """Where the layers' inputs hold the examples, as `trace` has found it."""
        return self._passes.plan

    @plan.setter
    def plan(self, plan: ClipPlan) -> None:
        self._passes.plan = plan

    def trace(self, losses_of: Callable[[Sequence[int]], Tensor], examples: Sequence[int]) -> ClipPlan:
        """Find where every layer's input holds the examples, by a few forward passes; what was found before stays.

        Generators and buffers are as they were afterwards.

        Args:
            losses_of: numbers of examples -> their losses, (n,), through the model.
            examples: the first six are taken, the longest among them where lengths differ.

        Returns:
            The plan, which later passes look calls up in.

        Raises:
            UserError: a layer mixes the examples, puts them in another order or lets data choose its rows.
        """
        with nullcontext() if self._direct else moved_parameters(self.model):  # what is whole of shards would stay
            return self._trace(losses_of, list(dict.fromkeys(examples))[:TRACED])

    def _trace(self, losses_of: Callable[[Sequence[int]], Tensor], examples: Sequence[int]) -> ClipPlan:
        with unchanged(self.model) as generators:
            runs = Runs(self.model, losses_of, generators)

            def run(rows: list[int], note: Note) -> Tensor:
                with (
                    self._patches.installed(),
                    self._passes.forward(len(rows), note=note),
                    runs.drawing(),
                ):
                    return runs.losses(rows).detach()

            self.plan = self.plan.joined(trace(run, runs, examples))
        return self.plan

    # -- one microbatch -------------------------------------------------------------------------------------------

    def clip(self, losses_of: Callable[[Sequence[int]], Tensor], examples: Sequence[int]) -> Tensor:
        """Run a microbatch forward and backward: `losses`, then `backward`.

        Returns:
            The losses, (n,), without their graph.
        """
        losses = self.losses(losses_of, examples)
        self.backward(losses)
        return losses.detach()

    def losses(
        self,
        losses_of: Callable[[Sequence[int]], Tensor],
        examples: Sequence[int],
        rewind: Callable[[], None] | None = None,
    ) -> Tensor:
        """The losses of a microbatch, (n,), for `backward`. A call of a layer that the plan does not know is traced on
        these examples, once; the masks are those of a plan that had known it.

        Args:
            losses_of: numbers of examples -> one loss for each of them, (n,), through the model.
            examples: the microbatch.
            rewind: puts the default generators back to where they stand now; None has them noted.

        Raises:
            UserError: as `trace` does.
        """
        rewind = rewind or Generators((self._table.device,)).standing()
        try:
            with self.forward(len(examples)):
                return losses_of(examples)
        except UntracedCall:
            if self._direct:  # other processes wait for this one's part of a pass
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
    def forward(self, examples: int, microbatch: Hashable = NOT_NAMED) -> Iterator[None]:
        """Inside, the model's layers clip; its losses, for so many examples, are then for `backward`.

        Args:
            examples: B.
            microbatch: a name, where several forward passes wait for their backward passes (`backward_of`).

        Raises:
            UserError: inside of another pass.
        """
        with self._patches.installed(), self._passes.forward(examples, microbatch):
            yield

    def backward(self, losses: Tensor, present: Tensor | None = None) -> None:
        """Add the clipped sums of one microbatch to the parameters' .grad, and its counts to `counts`.

        Args:
            losses: one loss per example, (B,), of the last `forward`; they are summed, never averaged.
            present: (B,), False at fillers, whose losses were multiplied by 0 and whose norms are not counted.

        Raises:
            UserError: losses of another shape; a parameter frozen or thawed since `attach`, or used outside its layer;
                a trainable parameter that the losses do not reach.
        """
        ghost = self.norms == "ghost"
        with self._backward(Phase.NORMS if ghost else Phase.CLIP) as running:
            check_losses(losses, running.examples)
            if self._direct or not self._checked:  # else autograd's own gradients show what bypasses its layer
                check_paths(losses, self._names, self._direct)
            if ghost:
                squares = self._ghost_norms(running, losses)
                running.begin_sums(squares, clip_factors_of(self.groups, [squares])[0])
            run_backward(losses, self._into)
            self._check_reached(running)
            self._count(running.squared_norms, running.examples, present)

    def _ghost_norms(self, running: Pass, losses: Tensor) -> Tensor:
        """First pass: only squared norms; the graph stays for the second."""
        group_pass = running.groups.get(0)
        if group_pass is None or group_pass.probe is None:
            raise UserError("The losses do not come from the model: none of its layers ran with gradients on.")
        torch.autograd.grad(losses.sum(), group_pass.probe, retain_graph=True, allow_unused=True)
        with torch.no_grad():
            return total_squares([group_pass])[0]

    @contextmanager
    def _backward(self, phase: Phase, microbatch: Hashable = NOT_NAMED) -> Iterator[Pass]:
        """Inside, layers report; afterwards the pass is over."""
        self._attached.check_same()
        with self._passes.backward(phase, microbatch) as running, full_float32(), no_autocast(self._table.device.type):
            self._begin_clipping()
            # Layers are patched here, too, for what runs once more (checkpointing).
            with self._passes.gradients.collected(), self._patches.installed():
                yield running

    def check_output(self, output: Tensor) -> None:
        """Prove, from a forward pass's output (any shape), that no parameter's gradient bypasses its group.

        `backward` does it each time; the model of a pipeline runs the same code on every microbatch, so once is enough.

        Raises:
            UserError: as `backward` of such a parameter.
        """
        self._attached.check_same()
        check_paths(output, self._names, shards=self._direct)

    @contextmanager
    def backward_of(self, microbatch: Hashable, absent: int = 0) -> Iterator[None]:
        """A backward pass inside, by anybody and from any output of `forward(…, microbatch)`, clips and is counted.

        Its outputs must add up to Σ_i loss_i over the rows i of the batch, as `backward` has them.

        Args:
            microbatch: the name that `forward` got; it may be used again afterwards.
            absent: how many of its examples, at the end, are fillers: their losses have weight 0, and they are not
                counted.

        Raises:
            UserError: no such forward pass; inside another one; a group or parameter that was not reached; ghost norms,
                which take two passes.
        """
        if self.norms == "ghost":
            raise UserError("norms='ghost' takes two backward passes: use norms_of, then sums_of.")
        with self._backward(Phase.CLIP, microbatch) as running:
            yield
            self._check_reached(running)
            present = running.examples - absent
            self._count({k: squares[:present] for k, squares in running.squared_norms.items()}, present)

    @contextmanager
    def norms_of(self, microbatch: Hashable) -> Iterator[None]:
        """A backward pass inside only makes `squared_norms[k]`, ‖g_k^(i)‖², (B,): no parameter gets a gradient.

        It uses the graph up, so `sums_of` needs the forward pass again. Nothing is counted (see `count_norms`).

        Raises:
            UserError: no such forward pass; inside another one; a group that was not reached.
        """
        with self._backward(Phase.NORMS, microbatch) as running:
            yield
            check_groups(self.groups, running)
            self.squared_norms = running.squared_norms

    @contextmanager
    def sums_of(self, microbatch: Hashable, factors: Tensor | None = None) -> Iterator[None]:
        """A backward pass inside adds Σ_i factor_i · ∂loss_i to .grad, and is not counted; the losses are as they were.

        Args:
            microbatch: the name that `forward` got.
            factors: (B,), of `factors`; rows with factor 0 are left out, whatever they hold. None: all are 1.

        Raises:
            UserError: no such forward pass; inside another one; a parameter that was not reached; several groups.
        """
        if len(self.groups) != 1:
            raise UserError(f"Factors clip one group; this engine has {len(self.groups)}: use backward_of.")
        with self._backward(Phase.SUMS, microbatch) as running:
            running.factors = None if factors is None else Factors.of(factors)
            yield
            self._check_reached(running)

    def _check_reached(self, running: Pass) -> None:
        check_groups(self.groups, running)
        self._passes.gradients.check()
        self._checked = True

    def detach(self) -> None:
        """Let go of what waits; the model itself is as it was after each pass."""
        self._passes.forget()

    def __enter__(self) -> "ClippingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


attach = ClippingEngine
"""The engine's usual name: `attach(model, partition, thresholds)`."""
