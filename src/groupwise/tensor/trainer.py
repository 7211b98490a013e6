"""Trains a model whose tensors are cut over processes: each clips and noises its own parts, by norms of the whole.

Formal guarantee: what P processes release together has the law of one process's release, at the same ε. Process p adds
up f⁽ⁱ⁾·v_kp⁽ⁱ⁾, where v_kp⁽ⁱ⁾ is its part of example i's gradient in group k and f⁽ⁱ⁾ the clip factor.

1. All draw the same batch and run the same microbatches, with messages inside forward and backward pass, so each has
   every example's losses. A message is a sum over processes of one example's numbers, never over examples, so v⁽ⁱ⁾
   depends on example i alone.
2. A group's squared norms are summed over the processes before its factors are formed: n² = Σ_p ‖v_kp⁽ⁱ⁾‖² and
   f = min(1, C_k/n) are the same in all. So an example's parts are together at most C_k. That asks nothing of what the
   parts are parts of, only that the vectors which were measured are those that are added up.
3. Every coordinate of the model is released by one process, once. What is whole in all of them (LayerNorms, positions,
   biases of layers whose outputs are summed) the first one clips and noises, and it alone counts the square; the others
   take what it released.
4. Each process's noise is of a key of its own, derived from the run's, and std_k follows from all K thresholds and the
   sizes of the whole groups, which all know: independent noise of the same scale in every coordinate.
5. A group's count is that of n, taken from the first process, with one noise. Per device a group is what one process
   owns: K = P, noise and counts of its own.
6. Masks are the same where all have a copy of the activations; where each has some of the heads, they follow from the
   secret generators' state and p. Examples' masks stay independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine
from groupwise.clipping.measure import norms_of_losses
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError
from groupwise.tensor.cutting import CutModel, cut
from groupwise.tensor.plan import Cut
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Alone, Ranks
from groupwise.training.step import Trainer
from groupwise.training.task import eval_mode

Losses = Callable[[Sequence[int] | np.ndarray], Tensor]


def cut_and_attach(
    model: nn.Module,
    engine: ClippingEngine | None,
    clip: ClipConfig,
    ranks: Alone | Ranks,
    device: torch.device,
    losses_of: Losses,
    examples: Sequence[int],
    cuts: list[Cut] | None = None,
    *,
    tolerance: float = 0.05,
    loss_tolerance: float = 1e-3,
) -> tuple[ClippingEngine | None, CutModel]:
    """Leave this process its part of a model, and clip that; `engine`, of the whole model, is detached.

    Args:
        losses_of: numbers of examples -> a loss each.
        examples: whose losses and norms must be the same before and after.
        cuts: as `cut` has it.
        tolerance, loss_tolerance: relative, of norms and losses.

    Raises:
        UserError: a model that cannot be cut; losses or norms that the parts together do not have.
    """
    before = _measured(model, losses_of, engine, examples)
    if engine is not None:
        engine.detach()
    made = cut(model, ranks, device, cuts)
    if engine is not None:
        add_up = None if clip.grouping == "device" else ranks.add_parts_
        engine = make_engine(model, clip, parts=made.parts(add_up))
    losses, norms = _measured(model, losses_of, engine, examples)
    if engine is not None and clip.grouping == "device":
        squares = norms.square().to(device)
        ranks.add_parts_(squares)
        norms = squares.sqrt().cpu()
    if not torch.allclose(losses, before[0], rtol=loss_tolerance, atol=1e-6):
        raise UserError(
            f"The model cut in {ranks.parts} has other losses than the whole one ({losses.tolist()} instead of "
            f"{before[0].tolist()}), so a layer of it is not cut as it should be: use parallel.kind=ddp."
        )
    for k, (there, here) in enumerate(zip(before[1], norms, strict=True)):
        if not torch.allclose(here, there, rtol=tolerance, atol=1e-9):
            assert engine is not None
            raise UserError(
                f"The parts of group {engine.groups[k].name!r} have norms {here.tolist()} where the whole has "
                f"{there.tolist()}, so a layer of it is not cut as it should be: use parallel.kind=ddp."
            )
    return engine, made


def _measured(
    model: nn.Module, losses_of: Losses, engine: ClippingEngine | None, examples: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Losses (n,) and norms (K, n) of examples without dropout, float64 on the CPU; (0, n) without an engine."""
    with eval_mode(model):
        losses = losses_of(examples)
        norms = losses.new_zeros(0, len(examples)) if engine is None else norms_of_losses(engine, losses)
    return losses.detach().double().cpu(), norms.double().cpu()


@dataclass(kw_only=True)
class TensorTrainer(Trainer):
    """A `Trainer` of this process's part of a model, `cut.model`; all processes call the same methods at once."""

    cut: CutModel

    @property
    def _one_group(self) -> bool:
        return self.mechanism.one_count

    def step(self, step: int) -> list[float]:
        """Run step `step` (0-based); returns this process's part of what `report` takes."""
        loss, *_ = parts = super().step(step)
        first = float(self.ranks.part == 0)
        if self.engine is None:
            return [loss * first]
        share = first if self._one_group else 1.0
        clipped = self._known["nonprivate/clipped"] * share * len(self.engine.groups) / self.plan.num_groups
        by_part = [0.0] * self.ranks.parts
        by_part[self.ranks.part] = parts[1]
        return [loss * first, clipped, self._known["noise_norm"] ** 2 * share, *by_part]

    def report(self, totals: list[float]) -> dict[str, float]:
        """What the last step may log, of all parts, from the sums over all processes."""
        return super().report(totals) if self.engine is None else self._report_of_parts(*totals)

    def _halve(self) -> None:
        """Refuse: the other processes are in the middle of the same microbatch."""
        raise UserError(
            f"Microbatches of {self.microbatch} do not fit into this process's memory: lower train.microbatch."
        )

    def state_dict(self) -> dict[str, Any]:
        """As `Trainer.state_dict` of the whole model; thresholds by part, where each is a group of its own."""
        return self.cut.whole_state(super().state_dict(), self.ranks, self._one_group)

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go back to where `state_dict` was taken; every process has the whole of it."""
        super().load_state_dict(self.cut.local_state(state, self.ranks, self._one_group), step)

    def named_thresholds(self) -> dict[str, float]:
        """Group -> C_k; a part of the model that is one group is called by its number."""
        own = super().named_thresholds()
        if self._one_group:
            return own
        return {
            f"part {part}": value for part, each in enumerate(self.ranks.gather_parts(own)) for value in each.values()
        }

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write the whole model for other programs."""
        whole = self.cut.whole_model()
        if not self.ranks.main:
            return
        parameters = dict(self.task.model.named_parameters())
        own = {name: parameters[name].data for name in self.cut.splits}
        try:
            for name in own:
                parameters[name].data = whole[name]
            self.task.export(folder, provenance)
        finally:
            for name, part in own.items():
                parameters[name].data = part

    def _model_state(self) -> dict[str, Any]:
        return self.cut.whole_model()

    def _check_update(self, step: int) -> None:
        """Nothing: what the task remembers are parameters from before they were cut."""
