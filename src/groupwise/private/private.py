"""The private training that `make_private` returns, whose steps the user takes in a loop."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from groupwise.errors import UserError, reason, warn
from groupwise.privacy import FixedThresholds, NoiseSource, PrivacyPlan
from groupwise.private.arguments import PRIVATE_OPTIMIZERS, STEPPED, TRAINED, check_count, check_optimizer, trainings_of
from groupwise.private.data import fingerprint, length_of
from groupwise.private.dataset_sums import DatasetSums
from groupwise.training.checkpoint import load_checkpoint, save_checkpoint
from groupwise.training.private_step import PrivateStep
from groupwise.training.progress import Progress

EARLY = """
  This epsilon is a guarantee only if no result decided when to stop. If released weights or other data decided, the
  plan's epsilon is one. If training losses decided, neither is."""
NOT_PRIVATE = "NOT PRIVATE: the noise comes from a seed"
OPACUS = {"get_epsilon": "epsilon_at(delta)", "accountant": "plan", "remove_hooks": "detach()"}
USED: set[bytes] = set()
"""Digests of the noise keys of all trainings that have taken a step in this process."""


@dataclass(frozen=True)
class Step:
    """The report of a step. Everything but `nonprivate` may be published.

    Args:
        number: the number of steps taken so far, including this one.
        plan: the privacy plan of the training.
        nonprivate: values over all processes, without noise. "loss": the mean over the drawn examples (NaN for an empty
            batch); "batch_size": their number; "clipped": the fraction that was clipped, by group name; "nonfinite":
            the number that was left out; "examples_per_second", which also reveals their number.
    """

    number: int
    plan: PrivacyPlan = field(repr=False)
    nonprivate: dict[str, Any] = field(repr=False)

    @property
    def epsilon(self) -> float:
        """ε of the steps up to and including this one, at the plan's δ. Computing it can take seconds."""
        return self.plan.spent_epsilon(self.number)


@dataclass(frozen=True)
class Steps:
    """The next steps of a private training, up to number `last`. Iterating takes them, and shows the progress."""

    private: "Private"
    last: int

    def __len__(self) -> int:
        return max(self.last - self.private.executed, 0)

    def __iter__(self) -> Iterator[Step]:
        private = self.private
        hidden = not (private.core.ranks.main and sys.stderr.isatty())
        with Progress(private.plan, private.executed, self.last, disable=hidden) as bar:
            while private.executed < self.last:
                step = private.step()
                bar.step(step.number)
                yield step


class Private:
    """A private training, which `make_private` returns.

    Example::

        for step in private.steps():
            scheduler.step()
        print(private.statement())
    """

    def __init__(self, core: PrivateStep, undo: ExitStack, settings: dict[str, Any]) -> None:
        assert core.engine is not None and isinstance(core.sums, DatasetSums), "make_private makes no other"
        self.core, self.engine, self._sums, self.settings = core, core.engine, core.sums, settings
        """`settings` may not change when the training resumes."""
        self._names = [group.name for group in core.engine.groups]
        self._restore = undo
        """Its callbacks restore the model and the optimiser."""
        undo.callback(core.optimizer.register_step_pre_hook(self._before_optimizer).remove)
        undo.callback(core.sums.forget)
        self._modes = {module: module.training for module in core.model.modules()}
        self._closed = self._agreed = self._released = self._resumed = self._earlier = False
        self._process = os.getpid()
        self._optimized = {id(p) for group in core.optimizer.param_groups for p in group["params"]}
        TRAINED.update(dict.fromkeys(core.model.modules(), ref(self)))
        PRIVATE_OPTIMIZERS.add(core.optimizer)

    def __repr__(self) -> str:
        """The type of the model, the number of steps taken, and the plan's guarantee."""
        plan, kind = self.plan, type(self.model).__name__
        promised = f"({plan.epsilon:.4g}, {plan.delta:g})-DP after all of them"
        promised = promised if self.core.noise.is_secret else NOT_PRIVATE
        return f"<private training of a {kind}: {self.executed} of {plan.steps} steps taken; {promised}>"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an AttributeError; for names of Opacus it says what to use."""
        hint = f": use private.{OPACUS[name]}" if name in OPACUS else ""
        raise AttributeError(f"'Private' object has no attribute {name!r}{hint}", name=name, obj=self)

    # -- the guarantee and the spent budget ----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model. Between steps it is a plain model, without clipping."""
        return self.core.model

    @property
    def plan(self) -> PrivacyPlan:
        """The privacy plan, which sets all noise scales."""
        return self.core.plan

    @property
    def executed(self) -> int:
        """The number of steps taken so far, including those with an empty batch."""
        return self.core.executed

    @property
    def epsilon(self) -> float:
        """ε of the steps taken so far, at the plan's δ. Computing it can take seconds.

        It is a guarantee only if no result of the run decided when to stop; otherwise the plan's is (docs/privacy.md).
        """
        return self.plan.spent_epsilon(self.executed)

    def epsilon_at(self, delta: float) -> float:
        """ε of the steps taken so far at another δ, with the same noise. Computing it can take seconds."""
        return replace(self.plan, delta=delta).spent_epsilon(self.executed)

    @property
    def thresholds(self) -> dict[str, float]:
        """The thresholds C_k of the next step by group name. They may be published, as adaptive ones are noisy."""
        return self.core.named_thresholds()

    def set_threshold(self, threshold: float) -> None:
        """Clip to C = ``threshold`` from the next step on, with C/√K in each of K groups.

        The noise scales with it, so ε does not change. Like a learning rate, the threshold may depend on the step
        number, but not on the data.

        Raises:
            UserError: the thresholds are adaptive; ``threshold`` is not above 0; the call is inside a step.
        """
        self._check_open()
        thresholds = self.core.thresholds
        if self.core.running or type(thresholds) is not FixedThresholds:
            raise UserError(
                "set_threshold is for fixed thresholds, between steps: use a clipping mode such as clip='fixed_layer'."
            )
        groups = len(thresholds.clip_thresholds)
        thresholds.load_state_dict({"thresholds": torch.full((groups,), threshold / groups**0.5, dtype=torch.float64)})

    def statement(self) -> str:
        """The plan and the ε spent so far, as text."""
        secret = "" if self.core.noise.is_secret else f"{NOT_PRIVATE}. With secret noise:\n"
        spent = f"epsilon = {self.epsilon:.4g} at delta = {self.plan.delta:g}"
        early = "" if self.executed in (0, self.plan.steps) else EARLY
        earlier = "\n  Not included: an earlier private training of the same model." if self._earlier else ""
        steps = f"{self.executed} of {self.plan.steps} steps"
        return f"{secret}{self.plan.statement()}\nSpent: {spent} in {steps}.{early}{earlier}"

    # -- the loop ------------------------------------------------------------------------------------------------------

    def steps(self, count: int | None = None) -> Steps:
        """Iterate over the remaining steps, or over the next ``count`` of them. Each iteration takes one step.

        The body of the loop (schedulers, evaluation) runs between steps, when the model is a plain model.
        """
        check_count("count", count, 0)
        last = self.plan.steps
        return Steps(self, last if count is None else min(self.executed + count, last))

    def step(self) -> Step:
        """Take one step: draw a batch, clip each example's gradient, add noise, update the model, count the step.

        Modules run in the mode (train or eval) that they had when `make_private` was called. A step that fails before
        the noise is added, when memory runs out for example, has released nothing. The next call repeats it.

        Raises:
            UserError: all steps of the plan were taken; the number of examples changed; the losses cannot be clipped.
        """
        self._check_open()
        self._check_data()
        began, core = time.monotonic(), self.core
        if {*self.model.modules()} != {*self._modes}:
            raise UserError("Modules were added or removed: call private.detach(), then make_private again.")
        for module, training in self._modes.items():
            if module.training != training:
                module.training = training
        released = core.step()
        seconds = max(time.monotonic() - began, 1e-9)
        if core.executed == self.plan.steps:
            self._sums.forget()
        parts = core.ranks.gather((released.loss, released.nonfinite))
        drawn = max(released.drawn, 1)
        shown = {
            "loss": sum(loss for loss, _ in parts) / drawn if released.drawn else math.nan,
            "batch_size": released.drawn,
            "clipped": dict(zip(self._names, ((released.drawn - released.counts) / drawn).tolist(), strict=True)),
            "nonfinite": sum(nonfinite for _, nonfinite in parts),
            "examples_per_second": released.drawn / seconds,
        }
        return Step(core.executed, self.plan, shown)

    def _check_data(self) -> None:
        self._check_agreed()
        if self.executed >= self.plan.steps:
            raise UserError(
                f"All {self.plan.steps} steps of the plan were taken, and another would exceed the plan's epsilon: "
                "plan more epochs or steps in make_private."
            )
        core = self.core
        if {id(p) for group in core.optimizer.param_groups for p in group["params"]} != self._optimized:
            check_optimizer(core.model, core.optimizer)
        if length_of(self._sums.data) != self.plan.dataset_size:
            raise UserError(
                f"The data had {self.plan.dataset_size} examples and have {length_of(self._sums.data)} now: call "
                "make_private again, as the plan depends on this number."
            )

    # -- misuse --------------------------------------------------------------------------------------------------------

    def _before_optimizer(self, *_: Any) -> None:
        if not self.core.running:
            raise UserError(
                "private.step() calls optimizer.step() itself, on gradients with noise: remove optimizer.step(), "
                "loss.backward(), zero_grad() and any GradScaler from the loop; after it, call private.detach() to "
                "train without privacy."
            )
        if not self._released:  # once, as a set of many layers takes a tenth of a millisecond
            STEPPED.update(member.rule.module for group in self.engine.groups for member in group.members)
            self._released = True

    def _check_agreed(self) -> None:
        """Raise a `UserError` if the processes' keys, steps, plans or data differ, or the key was used before."""
        if self._agreed:
            return
        core, ranks = self.core, self.core.ranks
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if processes > ranks.replicas:
            raise UserError(
                f"{processes} processes train, but make_private was called for {ranks.replicas}: call it after "
                "init_process_group, or start one process (devices=1, num_processes=1)."
            )
        if ranks.replicas > 1:
            key = sha256(b"groupwise agreed" + core.noise.key).hexdigest()
            found = ranks.gather((key, self.executed, repr(self.plan), fingerprint(self._sums.data, core.noise)))
            for what, of in zip(("key", "step", "plan", "data"), zip(*found, strict=True), strict=True):
                if len({*of} - {None}) > 1:
                    raise UserError(
                        f"The processes do not have the same {what}: give make_private the same arguments and the "
                        "whole dataset in each process, as it divides each batch itself, and load the same state."
                    )
        used = core.noise.derive("used")
        if used in USED and core.noise.is_secret and not self._resumed:
            raise UserError(
                "noise_source was used by another training, and the same noise on other gradients would reveal their "
                "difference: leave it out, or give each training its own NoiseSource.fresh()."
            )
        USED.add(used)
        if not self._resumed and any(module in STEPPED for module in core.model.modules()):
            self._earlier = True
            warn(
                "The model was trained privately before, and epsilon counts this training alone: if the weights were "
                "not reset and the data are the same, add up the budgets (groupwise.privacy.composed_epsilon)."
            )
        self._agreed = True

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("This private training was detached: call make_private again, with a new privacy budget.")
        if os.getpid() != self._process:
            raise UserError(
                "This private training belongs to another process, and a fork would add the same noise to other "
                "gradients: call make_private in each process, with its own privacy budget."
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise a `UserError` for copies and pickles, as two trainings with one key would add the same noise twice."""
        raise UserError(
            "A private training cannot be copied or pickled, as the copy would add the same noise again: save "
            "private.state_dict(), and load it into a new training."
        )

    # -- saving and resuming ----------------------------------------------------------------------------------------

    @property
    def _processes(self) -> str:
        replicas = self.core.ranks.replicas
        return f"{replicas} process{'' if replicas == 1 else 'es'}{' in shards' if self.core.in_shards else ''}"

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed training needs. It contains the noise key: keep it secret.

        Its tensors are copies, which later steps do not change. With sharded parameters every process must call this,
        and gets the gathered tensors on the CPU.
        """
        return tree_map_only(Tensor, torch.clone, self._state())

    def _state(self) -> dict[str, Any]:
        self._check_open()
        if self.core.running:
            raise UserError("state_dict() inside a step would repeat its noise later: call it between steps.")
        return {**self.core.state_dict(), "processes": self._processes, "clip": self.settings, "earlier": self._earlier}

    def save(self, path: str | Path) -> None:
        """Write `state_dict` atomically to a file that only its owner can read. Replicas write one file together."""
        state = self._state()
        if self.core.ranks.main:
            save_checkpoint(path, state)

    def load(self, path: str | Path) -> None:
        """Resume from a file that `save` wrote; see `load_state_dict`."""
        self.load_state_dict(load_checkpoint(Path(path), "cpu" if self.core.in_shards else self.core.device))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, bit for bit, before the first step. This also restores the microbatch size.

        Raises:
            UserError: a step was taken already; the state has another plan, clipping, model, optimiser, or number of
                processes.
        """
        self._check_open()
        if self.executed:
            raise UserError(
                "This training has already taken steps, and resuming would repeat their noise on other gradients: call "
                "make_private again, and load the state before the first step."
            )
        named = state if isinstance(state, dict) else {}
        for part, here in (("plan", self.plan.to_dict()), ("clip", self.settings)):
            there = named.get(part, here)
            if isinstance(there, dict) and here | there != here:  # earlier versions saved fewer settings
                name = next(name for name in there if there[name] != here.get(name))
                both: Any = there[name], here.get(name)
                if all(isinstance(value, list) for value in both):  # their differences alone
                    both = [[x for x in both[i] if x not in both[1 - i]] for i in (0, 1)]
                before, now = (shorten(str(value), 200) for value in both)
                raise UserError(
                    f"The state was made with {name}={before}, but here it is {now}: give the same value, as the same "
                    "noise on two different gradients would reveal their difference."
                )
        if named.get("processes", self._processes) != self._processes:
            raise UserError(
                f"The state was made by {named['processes']}, but this training has {self._processes}, which "
                "divide a batch differently, so the same noise would be added to other gradients: start as many "
                "processes as before."
            )
        try:
            noise = NoiseSource.from_state(state)
            moments = tree_map_only(Tensor, torch.clone, state["optimizer"])  # steps change them in place
            self.core.load_state_dict({**state, "optimizer": moments})
        except UserError:
            raise
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"The state does not fit this model and optimiser ({reason(error)}): create them as before. The noise "
                "key was not loaded."
            ) from error
        self._sums.forget()
        self.core.use_key(noise)  # last, so that after an error above the key is not used for other gradients
        self._resumed, self._earlier = True, state.get("earlier", False)

    def detach(self) -> None:
        """End the training, and restore the model and the optimiser. No further steps can be taken."""
        if not self._closed:
            self._closed = True
            self._restore.close()
            for module in self.core.model.modules():
                TRAINED.pop(module, None)


def detach(model: nn.Module) -> None:
    """End the private trainings of ``model``, as `Private.detach` does, where the `Private` is no longer at hand."""
    for training in trainings_of(model):
        training.detach()
