"""Runs the private mechanism: what happens in one logical batch, in its order, whoever computes the losses.

`open` draws the batch and sets the thresholds, `microbatch` gives each part its secret masks, `backward` clips, and
`close` sums over replicas, adds noise once, moves the weights and then the thresholds, and counts the step. The loop of
`run.py` (`groupwise.training.step`) and `groupwise.make_private` both train through this object and through nothing
else.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine
from groupwise.errors import UserError
from groupwise.privacy import (
    AdaptiveThresholds,
    EpsilonReport,
    FixedThresholds,
    NoiseSource,
    PoissonSampler,
    PrivacyPlan,
    ShuffleSampler,
    release_gradients,
    secret_randomness,
)
from groupwise.privacy.noise import SecurePoissonSampler
from groupwise.privacy.randomness import refuse_another_seed
from groupwise.training.arithmetic import products
from groupwise.training.ranks import Alone, Ranks


class Sampler(Protocol):
    """Draws batches."""

    def indices(self, step: int, /) -> np.ndarray:
        """The examples of step `step`, (n,) int64."""


@dataclass(frozen=True)
class Released:
    """What one step released, and what is known of it; `drawn` and `counts` are not private.

    Args:
        drawn: examples in the logical batch, over all replicas.
        counts: how many of them were not clipped, (K,); (0,) without clipping.
        noise_norm: expected ℓ2 norm of the noise in the update; None without clipping.
    """

    drawn: int
    counts: Tensor
    noise_norm: float | None


@dataclass(kw_only=True)
class Mechanism:
    """Everything that a private step reads or changes beside the losses.

    Args:
        model: whose trainable parameters are released.
        engine: attached to it; None is plain training, without noise or guarantee, through the same steps.
        thresholds: of the engine's groups; None without an engine.
        plan: sets all noise scales.
        noise: the run's source, the same in all processes.
        allocation: of the noise to the groups: "global", "equal_budget" or "weighted".
        optimizer: over the trainable parameters.
        device: of the model.
        ranks: the processes of the run.
        sampler: by default the one that the plan names, from the run's key.
        executed: steps that were released: the ledger that ε is accounted from.
        keeps_gradients: whether they stay in their memory between batches, as zeros, for what was recorded on it.
    """

    model: nn.Module
    engine: ClippingEngine | None
    thresholds: FixedThresholds | AdaptiveThresholds | None
    plan: PrivacyPlan
    noise: NoiseSource
    allocation: str
    optimizer: torch.optim.Optimizer
    device: torch.device
    ranks: Alone | Ranks = field(default_factory=Alone)
    sampler: Sampler = None  # type: ignore[assignment]  # never None once made
    executed: int = 0
    keeps_gradients: bool = False

    def __post_init__(self) -> None:
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._opened: tuple[int, int] | None = None
        given = self.sampler
        self.use_key(self.noise)
        if given is not None:
            self.sampler = given

    def use_key(self, noise: NoiseSource) -> None:
        """Draw batches, masks and noise from this source from now on."""
        processes = self.ranks.replicas * self.ranks.stages
        self.noise = self.gradient_noise = self.count_noise = noise = noise.settled(self.device, processes)
        if self.in_shards:  # each process adds noise to its own shards, from a stream of its own
            self.gradient_noise = noise.child(f"shard {self.ranks.replica}")
        self.sampler = sampler_of(self.plan, noise)

    def open(self, step: int) -> np.ndarray:
        """Begin the logical batch of step `step` (0-based); returns its examples, (n,), for all replicas together.

        A batch that was open is forgotten, with all that it has summed.
        """
        drawn = self.sampler.indices(step)
        if self.engine is not None and self.thresholds is not None:
            self.engine.set_thresholds(self.thresholds.clip_thresholds, self.thresholds.count_thresholds)
        self.clear()
        self._opened = step, len(drawn)
        return drawn

    @property
    def drawn(self) -> int:
        """Examples in the open batch, over all replicas; not private. 0 where none is open."""
        return 0 if self._opened is None else self._opened[1]

    def clear(self) -> None:
        """Forget what was summed of the open batch, whose microbatches can then begin again."""
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        if self.engine is not None:
            self.engine.reset()

    def microbatch(self, step: int, start: int) -> AbstractContextManager[None]:
        """Inside, masks are those of the microbatch that begins at `start` in this process's share, and secret."""
        process = self.ranks.replica * self.ranks.stages + self.ranks.stage
        return secret_randomness(self.noise, step, start, process=process, device=self.device)

    def backward(self, losses: Tensor, filler: bool = False) -> None:
        """Add the clipped sums of a microbatch with losses (b,) to the gradients; on a GPU without TF32.

        Args:
            filler: the examples are not of the batch, and the pass is only for the messages that it sends: their losses
                count 0 times, which adds exactly nothing, and they are not counted.

        Raises:
            UserError: torch was seeded since the microbatch began; what `ClippingEngine.backward` refuses.
        """
        refuse_another_seed()
        losses = losses * 0 if filler else losses
        if self.engine is None:
            losses.sum().backward()
            return
        # The engine has this too, but torch could not read `allow_tf32` inside of it where a tf32 run has set that.
        exact = products(tf32=False) if self.device.type == "cuda" else nullcontext()
        with exact, self.engine.uncounted() if filler else nullcontext():
            self.engine.backward(losses)

    def close(self) -> Released:
        """End the logical batch: one release, one update, one step on the ledger.

        Raises:
            UserError: no batch is open, so that this would be a second noise on it.
        """
        if self._opened is None:
            raise UserError("No logical batch is open, so there is nothing to release: open(step) begins one.")
        (step, drawn), self._opened = self._opened, None
        try:
            counts = self._sum_over_replicas()
            noise_norm = self._release(step)
            self.optimizer.step()
            if self.thresholds is not None:
                self.thresholds.update(counts, drawn, self.count_noise, step)  # last: noise took those that clipped
        finally:
            self.executed += 1  # whatever happened in between: this noise is never added to other gradients
        return Released(drawn, counts, noise_norm)

    def drop(self) -> None:
        """Forget the batch that is open, if one is, with all that it has summed."""
        if self._opened is not None:
            self._opened = None
            for parameter in self.trainable:
                parameter.grad = None

    def _sum_over_replicas(self) -> Tensor:
        """Gradient sums become those of the whole batch, in place; returns its counts, (K,), or (0,) unclipped."""
        counts = torch.zeros(0) if self.engine is None else self.engine.counts
        if self.ranks.replicas > 1:
            on_device = counts.to(self.device)
            self.ranks.sum_([*self._own_sums(), *([on_device] if len(counts) else [])])
            counts = on_device.cpu()
        return counts

    def _own_sums(self) -> list[Tensor]:
        """Gradients that hold this replica's share alone; those of an empty share are zeros."""
        return [] if self.in_shards else self._gradients()  # shards were summed on their way here

    @property
    def in_shards(self) -> bool:
        """Does each process hold a part of every parameter (FSDP2), and gradients that are summed already?"""
        return any(hasattr(parameter, "to_local") for parameter in self.trainable)

    def _gradients(self) -> list[Tensor]:
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.trainable if parameter.grad is not None]

    def _release(self, step: int) -> float | None:
        """Noise once for the logical batch, as far as the engine says one example moves it; then divide by B."""
        batch_size = self.plan.expected_batch_size
        if self.engine is None:
            for gradient in self._gradients():
                gradient.div_(batch_size)
            return None
        stds = release_gradients(
            self.engine.sensitivity(self.plan.adjacency),
            allocation=self.allocation,
            noise_multiplier=self.plan.gradient_noise_multiplier,
            expected_batch_size=batch_size,
            noise=self.gradient_noise,
            step=step,
            groups_elsewhere=self.plan.num_groups - len(self.engine.groups),
        )
        sizes = torch.tensor([sum(p.numel() for p in group.parameters) for group in self.engine.groups])
        return float((stds.square() * sizes).sum().sqrt()) / batch_size

    def spent(self) -> EpsilonReport:
        """What the steps on the ledger cost, accounted anew; seconds, where this process has not composed as many."""
        return self.plan.spent(self.executed)

    def state_dict(self) -> dict[str, Any]:
        """Plan, key and thresholds; with the weights, the optimiser and the step, all that the next step needs."""
        return {
            "thresholds": {} if self.thresholds is None else self.thresholds.state_dict(),
            "noise_key": self.noise.key,
            "noise_is_secret": self.noise.is_secret,
            "noise_secure": self.noise.secure,
            "noise_drawn": self.noise.drawn,
            "plan": self.plan.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go back to after `step` steps (plan and key are the caller's)."""
        if self.thresholds is not None:
            self.thresholds.load_state_dict(state["thresholds"])
        self._opened, self.executed = None, step


def sampler_of(plan: PrivacyPlan, noise: NoiseSource) -> Sampler:
    """The same batches on every process, as they follow from the run's key."""
    key = noise.derive("sampling")
    if plan.sampling == "shuffle":
        return ShuffleSampler(plan.dataset_size, round(plan.expected_batch_size), key)
    sampler = SecurePoissonSampler if noise.secure else PoissonSampler
    return sampler(plan.dataset_size, plan.sample_rate, key)
