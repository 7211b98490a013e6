"""The private step: Algorithm 1, from sampling the batch to counting the step.

All training uses it: `run.py`, `groupwise.make_private`, `PrivateTrainer`, replicas, shards and pipeline stages. They
differ only in how they compute the clipped sums of a batch (`BatchSums`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine, ClipPlan, matmul
from groupwise.clipping.checks import LossesOf
from groupwise.errors import UserError, warn
from groupwise.privacy import (
    AdaptiveThresholds,
    FixedThresholds,
    NoiseSource,
    PoissonSampler,
    PrivacyPlan,
    ShuffleSampler,
    release_gradients,
    secret_randomness,
)
from groupwise.privacy.secure_noise import SecurePoissonSampler
from groupwise.training.guards import StepGuard
from groupwise.training.memory import TRIMMED, return_freed_memory
from groupwise.training.ranks import Ranks
from groupwise.training.shards import are_shards, in_shards, reshard, whole


class BatchSums(Protocol):
    """Computes the clipped sums of drawn batches."""

    size: int
    """The largest number of examples in a microbatch."""
    keeps_gradients: bool
    """Whether gradients are set to zero between batches and not to None, as CUDA graphs write to their memory."""

    def add(self, private: "PrivateStep", step: int, drawn: np.ndarray) -> Tensor:
        """Call `PrivateStep.clear`, and set `.grad` to the clipped sums of this process's share of the batch `drawn`.

        `drawn` has the indices of the whole batch, (n,) int64. Returns the sum of the losses of the share, ().
        """


NONFINITE = (
    "The gradients of some examples are not finite, so these examples are left out: look for NaN in the data or in the "
    "losses. nonprivate['nonfinite'] counts them at each step. This warning depends on the data, and is not private."
)


@dataclass(frozen=True)
class Released:
    """The result of a step. Only `noise_norm` may be published.

    Args:
        drawn: the size of the batch, over all replicas.
        counts: b̄_k, the numbers of examples that were not clipped, (K,); (0,) without clipping.
        loss: the sum of the losses in this process.
        nonfinite: the number of examples in this process that were left out because a norm was not finite.
        noise_norm: the expected ℓ2 norm of the noise in the averaged gradient; None without clipping.
    """

    drawn: int
    counts: Tensor
    loss: float
    nonfinite: int
    noise_norm: float | None


@dataclass(kw_only=True)
class PrivateStep:
    """A model, its data and its privacy mechanism. `step` takes one private step.

    Args:
        model: the model, whose trainable parameters are released.
        engine: the clipping engine that is attached to the model; None trains without clipping, noise and guarantee.
        thresholds: C_k of the engine's groups; None without an engine.
        noise: the source of the run's randomness, the same in all processes.
        allocation: how the noise is allocated to the groups: "global", "equal_budget" or "weighted".
    """

    model: nn.Module
    engine: ClippingEngine | None
    thresholds: FixedThresholds | AdaptiveThresholds | None
    plan: PrivacyPlan
    noise: NoiseSource
    allocation: str
    optimizer: torch.optim.Optimizer
    device: torch.device
    sums: BatchSums
    ranks: Ranks = field(default_factory=Ranks)
    sampler: Any = field(init=False)
    """The plan's sampler, seeded from the noise key: `indices(step)` are the examples of a step, (n,) int64."""
    executed: int = field(init=False, default=0)
    """The number of steps that were released, from which ε is computed."""
    running: bool = field(init=False, default=False)
    """Whether a step is running."""
    _rewind: Callable[[], None] | None = field(init=False, default=None)
    """Resets the random generators to their state at the beginning of the current microbatch."""

    def __post_init__(self) -> None:
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.in_shards = are_shards(self.trainable)
        """Whether each process has a shard of every parameter (FSDP2), so that FSDP2 sums gradients over processes."""
        self._guard = StepGuard(self.model)
        self.use_key(self.noise)

    @property
    def process(self) -> int:
        """The rank of this process."""
        return self.ranks.replica * self.ranks.stages + self.ranks.stage

    def use_key(self, noise: NoiseSource) -> None:
        """Use this source for batches, dropout masks and noise from now on."""
        self.noise = self.gradient_noise = self.count_noise = noise = noise.settled(self.device)
        if self.in_shards:  # each process adds noise to its own shards, from its own stream
            self.gradient_noise = noise.child(f"shard {self.ranks.replica}")
        self.sampler = sampler_of(self.plan, noise)

    # -- Algorithm 1 --------------------------------------------------------------------------------------------------

    def step(self) -> Released:
        """Take one step of Algorithm 1: one batch, one release, one update.

        A step that fails before the noise is added has released nothing. The next call repeats it, with the same batch
        and noise. See `StepGuard` and `ClippingEngine.clip` for errors.
        """
        if self.running:
            raise UserError("A private step began inside another one: call step() outside of the losses.")
        reshard(self.model)
        self.running, step = True, self.executed
        try:
            return self._step(step)
        except BaseException:
            if self.engine is not None:
                self.optimizer.zero_grad()  # the sums may be without noise
            raise
        finally:
            self.running = False

    def _step(self, step: int) -> Released:
        with nullcontext() if self.engine is None else self._guard.batch():
            drawn = self.sampler.indices(step)  # line 6
            if self.engine is not None and self.thresholds is not None:
                self.engine.set_thresholds(self.thresholds.clip_thresholds, self.thresholds.count_thresholds)
            loss = self.sums.add(self, step, drawn)  # lines 7-12
        counts = self._sum_over_replicas()
        self.executed += 1  # before the noise, so that no later step repeats it if anything fails from here on
        noise_norm = self._release(step)  # line 13, with the thresholds that clipped
        self.optimizer.step()  # line 14
        if self.thresholds is not None:
            self.thresholds.update(counts, len(drawn), self.count_noise, step)  # lines 15-17
        if self.device.type == "cpu" and self.executed % TRIMMED == 0:
            return_freed_memory()
        nonfinite = 0 if self.engine is None else self.engine.nonfinite
        if nonfinite:
            warn(NONFINITE)  # Python shows it only once for each line
        return Released(len(drawn), counts, float(loss), nonfinite, noise_norm)

    def clear(self) -> None:
        """Clear gradients and counts, before a batch is computed for the first time or again."""
        self.optimizer.zero_grad(set_to_none=not self.sums.keeps_gradients)
        if self.engine is not None:
            self.engine.reset()

    @contextmanager
    def microbatch(self, step: int, start: int) -> Iterator[None]:
        """Seed the random generators from the key, the step, and the microbatch's start in this process's share."""
        generators = secret_randomness(self.noise, step, start, process=self.process, device=self.device)
        with generators as self._rewind:
            yield
        self._rewind = None

    def clip(self, losses_of: LossesOf, rows: Sequence[int], present: Tensor | None = None) -> Tensor:
        """Add the clipped sums of a microbatch to the gradients; returns its losses, (b,), detached, 0 for filler rows.

        Args:
            losses_of: returns the losses of the microbatch, (b,), or of some of its examples.
            rows: the indices of the microbatch's examples, (b,).
            present: (b,), False for filler rows, which are not in the batch. Their losses are multiplied by 0, and
                their norms are not counted. None if there are no fillers.
        """
        if self.engine is None:
            losses = losses_of(rows) if present is None else losses_of(rows) * present
            losses.sum().backward()
            return losses.detach()
        with self._guard.losses():
            losses = self.engine.losses(losses_of, rows, self._rewind)
            losses = losses if present is None else losses * present
        self.engine.backward(losses, present)
        return losses.detach()

    def _sum_over_replicas(self) -> Tensor:
        """Sum gradients over the replicas in place; returns the summed counts, (K,), or (0,) without clipping."""
        counts = torch.zeros(0) if self.engine is None else self.engine.counts
        if self.ranks.replicas > 1:
            clip = torch.zeros(0) if self.thresholds is None else self.thresholds.clip_thresholds
            shared = torch.stack([clip, clip.square()])
            on_device = torch.cat([counts, *shared]).to(self.device)
            own = [] if self.in_shards else self._gradients()  # FSDP2 has already summed shards
            self.ranks.sum_([*own, *([on_device] if len(counts) else [])])
            counts, *sums = on_device.cpu().split(max(len(counts), 1))
            if sums and not torch.allclose(torch.stack(sums), self.ranks.replicas * shared, 1e-9, 0.0):
                raise UserError("The processes clip to different thresholds: set the same ones in each of them.")
        return counts

    def _gradients(self) -> list[Tensor]:
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.trainable if parameter.grad is not None]

    def _release(self, step: int) -> float | None:
        """Add noise once, scaled to the engine's sensitivity, and divide by B; returns the noise's expected norm."""
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
        squares = (size * std**2 for size, std in zip(self.group_sizes, stds.tolist(), strict=True))
        return math.sqrt(sum(squares)) / batch_size

    @cached_property
    def group_sizes(self) -> list[int]:
        """d_k, the number of trainable entries of each of the engine's groups."""
        groups = () if self.engine is None else self.engine.groups
        return [sum(parameter.numel() for parameter in group.parameters) for group in groups]

    def named_thresholds(self) -> dict[str, float]:
        """The thresholds C_k of the next step by group name; {} without clipping."""
        if self.engine is None or self.thresholds is None:
            return {}
        names = [group.name for group in self.engine.groups]
        return dict(zip(names, self.thresholds.clip_thresholds.tolist(), strict=True))

    # -- the state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, including the noise key. All processes must call this together.

        The tensors of a sharded model are gathered, on the CPU.
        """
        reshard(self.model)
        state = {
            "step": self.executed,
            "plan": self.plan.to_dict(),
            **self.noise.state_dict(),
            "thresholds": {} if self.thresholds is None else self.thresholds.state_dict(),
            "matmul": self.ranks.gather(matmul.used()),
            "clip_plan": {} if self.engine is None else self.engine.plan.state_dict(),
            "microbatches": self.ranks.gather(self.sums.size),
            "cuda_graph": self.sums.keeps_gradients,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        return whole(state) if self.in_shards else state

    def weights(self) -> dict[str, Any]:
        """The model's part of `state_dict`."""
        reshard(self.model)
        state = self.model.state_dict()
        return whole(state) if self.in_shards else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, except for the plan and the key, which the caller handles."""
        if state.get("cuda_graph", self.sums.keeps_gradients) != self.sums.keeps_gradients:
            raise UserError(
                f"The state was made with cuda_graph={state['cuda_graph']}: give the same value, as graphs pad "
                "microbatches, so a repeated step would have other dropout masks with the same noise."
            )
        if self.in_shards:
            reshard(self.model)
            state = in_shards(state, self.model, self.optimizer)
        used, known = state["matmul"], ClipPlan.from_state_dict(state["clip_plan"])  # `used` is a name in version 0.4.0
        step, size, thresholds = state["step"], state["microbatches"][self.process], state["thresholds"]
        both = state["model"], self.model.state_dict()
        shapes, own = ({(name, getattr(value, "shape", ())) for name, value in of.items()} for of in both)
        if odd := shapes ^ own:
            raise ValueError(f"{min(odd)[0]} is missing or has another shape")
        self.optimizer.load_state_dict(state["optimizer"])  # before anything changes, as it refuses other parameters
        if self.thresholds is not None:
            self.thresholds.load_state_dict(thresholds)
        self.model.load_state_dict(state["model"])
        matmul.repeat(used if isinstance(used, str) else used[self.process])
        if self.engine is not None:
            self.engine.plan = self.engine.plan.joined(known)
        self.sums.size = size  # dropout masks depend on it
        self.executed = step


def sampler_of(plan: PrivacyPlan, noise: NoiseSource) -> PoissonSampler | ShuffleSampler:
    """The plan's sampler, seeded from the noise key. It draws the same batches in every process."""
    key = noise.derive("sampling")
    if plan.sampling == "shuffle":
        return ShuffleSampler(plan.dataset_size, round(plan.expected_batch_size), key)
    sampler = SecurePoissonSampler if noise.secure else PoissonSampler
    return sampler(plan.dataset_size, plan.sample_rate, key)
