"""Plants misuse, and takes the guard against it away: how far one example then moves what is released.

Every attack trains without noise, once on the data and once without the last example, or leaks that example in another
way. It returns the distance as a multiple of the claimed bound, C: more than 1 breaks the guarantee. With its guard the
code refuses the attack, or the distance is within the bound.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from groupwise import make_private
from groupwise.checkout import CHECKOUT
from groupwise.clipping import engine, trace, verification
from groupwise.clipping.autograd import run_backward
from groupwise.config.compose import compose_run
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.private import Private, make
from groupwise.private import private as loop
from groupwise.run import run
from groupwise.training import train as training
from groupwise.training.guards import StepGuard
from groupwise.training.private_step import PrivateStep
from trust.planted_bugs.bugs import Bug

N, C = 24, 0.1
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
X[-1] *= 30
Y = (X[:, 0] > 0).long()


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example, (b,)."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(rows: int, model: nn.Module | None = None, steps: int = 1, **given: Any) -> tuple[Private, Tensor]:
    """Full-batch steps on the first rows, and by how much they moved the weights: the clipped sum, where steps is 1."""
    torch.manual_seed(1)
    model = model or nn.Linear(6, 2)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = given.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=rows)
    usual = {"noise_multiplier": 0.0, "batch_size": rows, "microbatch": rows, "clip": "flat", "threshold": C}
    data = given.pop("dataset", TensorDataset)(X[:rows], Y[:rows])
    given = {"losses": losses_of, "noise_source": NoiseSource.from_seed(0), **usual, **given}
    private = make_private(model, optimizer, data, steps=steps, **given)
    for _ in private.steps():
        pass
    return private, nn.utils.parameters_to_vector(model.parameters()).detach() - before


def distance(attack: Callable[[int], Tensor]) -> float:
    """Between what is released of all examples and of all but the last, in multiples of C."""
    return float((attack(N) - attack(N - 1)).norm()) / C


def mixed_items(rows: list[Any]) -> Any:
    """MixUp with the neighbour in the batch."""
    x, y = default_collate(rows)
    return (x + x.roll(1, 0)) / 2, y


class Centred(TensorDataset):
    """Centres the items that it reads together."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        x, y = self[rows]
        return list(zip(x - x.mean(0), y, strict=True))


def hardest(model: nn.Module, batch: Any) -> Tensor:
    """The loss, but only of the 8 hardest examples of a batch."""
    losses = model(batch[0]).square().sum(1)
    return losses * (losses >= losses.topk(min(8, len(losses))).values[-1])


def soft_prompt() -> float:
    """A tensor that is no parameter gets the plain gradient of all examples."""
    prompt = torch.zeros(6, requires_grad=True)
    train(N, losses=lambda model, batch: losses_of(model, (batch[0] + prompt, batch[1])))
    return 0.0 if prompt.grad is None else float(prompt.grad.norm()) / C


def momentum(rows: int) -> Tensor:
    """A private step with the momentum of a plain one."""
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    losses_of(model, (X[:rows], Y[:rows])).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rows
    return train(rows, model, optimizer=optimizer)[1] / rows


class Bank(nn.Module):
    """Adds what the batches before had."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("bank", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) -> (B, 2)."""
        with torch.no_grad():
            self.bank += x.sum(0)
        return self.linear(x)


def bank() -> float:
    """What a buffer of the released model has kept of the last example."""
    models = [Bank(), Bank()]
    for model, rows in zip(models, (N, N - 1), strict=True):
        train(rows, model)
    return float((models[0].bank - models[1].bank).norm()) / C


def another_microbatch() -> float:
    """Two releases of one step with the same noise: of a training, and of its state with another microbatch."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    state: dict[str, Any] = {}
    moved = []
    for size in (N, N // 2):
        private = _begin(copy.deepcopy(model), size)
        if state:
            private.load_state_dict(copy.deepcopy(state))
        else:
            state = copy.deepcopy(private.state_dict())
        private.step()
        moved.append(nn.utils.parameters_to_vector(private.model.parameters()).detach())
    return float((moved[0] - moved[1]).norm()) / C


def _begin(model: nn.Module, size: int) -> Private:
    optimizer = torch.optim.SGD(model.parameters(), lr=N)
    given: dict[str, Any] = {"noise_multiplier": 1.0, "batch_size": N, "steps": 2, "clip": "flat", "threshold": C}
    source = NoiseSource.from_seed(0)
    return make_private(model, optimizer, TensorDataset(X, Y), losses_of, microbatch=size, noise_source=source, **given)


def one_source() -> float:
    """Two releases with one key, whose difference has no noise: how exactly it shows the last example's gradient."""
    source = NoiseSource.from_key(b"planted" * 5)
    given: dict[str, Any] = {"noise_multiplier": 5.0, "noise_source": source, "delta": 1e-5, "batch_size": N - 1}
    one, other = (train(rows, optimizer=None, **given)[1] / rows * (N - 1) for rows in (N, N - 1))
    return 5.0 * math.sqrt(one.numel()) * C / float((one - other).norm())


def weights_of_a_plain_run() -> float:
    """Infinite if a run from weights that the same data trained without noise says that it is private."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        words = ["task=cifar", "scale=smoke", "train.steps=1", f"paths.results={folder}"]
        plain = run(compose_run([*words, "clip=none"], CHECKOUT / "conf"))
        words += [f"model.weights={folder}/runs/{plain['hash'][:12]}", "privacy.accountant=rdp"]
        return math.inf if run(compose_run(words, CHECKOUT / "conf"))["plan.private"] else 0.0


@contextmanager
def unchecked() -> Iterator[None]:
    """Mixing is looked for neither by the trace nor by the check."""
    with (
        patch.object(trace, "REPLACED", ()),
        patch.object(trace, "_check_every_row", lambda *_: None),
        patch.object(make, "verify", lambda engine, losses_of, rows, **_: engine.trace(losses_of, rows)),
    ):
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Buffers may change, in the check and in a step."""
    with (
        patch.object(StepGuard, "_versions", lambda self: {}),
        patch.object(verification, "_check_buffers", lambda *_: None),
    ):
        yield


@contextmanager
def gradients_for_all() -> Iterator[None]:
    """Any tensor gets a gradient, and the graph is not walked."""
    with (
        patch.object(engine, "run_backward", lambda losses, into: run_backward(losses)),
        patch.object(engine, "check_paths", lambda *_: None),
    ):
        yield


def own_microbatch() -> Any:
    """A state does not set the microbatch, with which masks are dealt."""
    real = PrivateStep.load_state_dict

    def load(self: PrivateStep, state: dict[str, Any]) -> None:
        size = self.sums.size
        real(self, state)
        self.sums.size = size

    return patch.object(PrivateStep, "load_state_dict", load)


class Forgetful(set):  # type: ignore[type-arg]
    """Keeps nothing."""

    def add(self, _: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Guard:
    """One misuse.

    Args:
        misuse: in words. attack: the distance that it gives. off: takes the guard away. line: where the guard is.
    """

    misuse: str
    attack: Callable[[], float]
    off: Bug
    line: str


GUARDS = (
    Guard(
        "collate_fn that mixes (MixUp by roll)",
        lambda: distance(lambda rows: train(rows, collate_fn=mixed_items)[1]),
        unchecked,
        "clipping/trace.py: _check_every_row; private/make.py: verify",
    ),
    Guard(
        "dataset that mixes what it reads together",
        lambda: distance(lambda rows: train(rows, dataset=Centred)[1]),
        lambda: patch.object(make, "check_items", lambda *_: None),
        "private/data.py: check_items",
    ),
    Guard(
        "loss of the 8 hardest of a batch",
        lambda: distance(lambda rows: train(rows, losses=hardest)[1]),
        unchecked,
        "clipping/verification.py: MANY",
    ),
    Guard(
        "resumed with another microbatch",
        another_microbatch,
        own_microbatch,
        "training/private_step.py: load_state_dict sets sums.size",
    ),
    Guard(
        "weights of a plain run on the same data",
        weights_of_a_plain_run,
        lambda: patch.object(training, "counted", lambda *_: []),
        "training/earlier_runs.py: counted",
    ),
    Guard(
        "trainable tensor that is no parameter",
        soft_prompt,
        gradients_for_all,
        "clipping/engine.py: _into; clipping/checks.py: check_paths",
    ),
    Guard(
        "optimiser with the momentum of plain training",
        lambda: distance(momentum),
        lambda: patch.object(make, "check_fresh", lambda *_: None),
        "private/arguments.py: check_fresh",
    ),
    Guard("buffer that data move", bank, unwatched, "training/guards.py: _versions; clipping/verification.py"),
    Guard(
        "one noise_source for two trainings",
        one_source,
        lambda: patch.object(loop, "USED", Forgetful()),
        "private/private.py: USED",
    ),
)
IMPOSSIBLE = {
    "an optimiser that steps in the losses or in hooks; gradients scaled there": (
        "`.grad` is None while losses and backward run (`StepGuard.losses`, `ClippedGradients.collected`)"
    ),
    "normals that are exactly 0": "no word gives zero (`cpu_noise.box_muller`, `tests/privacy/test_cpu_noise.py`)",
    "a suspended loop leaves the generators in the key's state": "`Private.step` holds them, and no generator does",
}
"""What a misuse cannot do any more, and by which line."""


def outcome(guard: Guard, off: bool) -> float | None:
    """The distance with the guard, or without; None where the attack is refused."""
    with guard.off() if off else nullcontext():
        try:
            return guard.attack()
        except UserError:
            return None


HEAD = ("misuse", "without the guard", "with it", "guard")


def rows() -> list[list[str]]:
    """Lines under `HEAD`: distances in multiples of C, where more than 1 breaks the claim; then what is impossible."""
    lines = []
    for guard in GUARDS:
        found = outcome(guard, off=True), outcome(guard, off=False)
        said = ["refused" if each is None else f"{each:.2f}" for each in found]
        lines.append([guard.misuse, *said, guard.line])
    return [*lines, *([misuse, "impossible", "impossible", line] for misuse, line in IMPOSSIBLE.items())]


def holds(line: list[str]) -> bool:
    """Whether the guard of a line of `rows` is there, and is what keeps the claim."""
    _, without, with_it, _ = line
    return without == "impossible" or (without != "refused" and float(without) > 1 and with_it in ("refused", "0.00"))
