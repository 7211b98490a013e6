"""Clips one architecture in one mode, and compares sums, norms and counts with the reference."""

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from groupwise.clipping import ClippingEngine, Partition, attach, flat, per_layer, verify
from groupwise.errors import UserError, message
from trust.models.architecture import Architecture, Size, Subject
from trust.models.rows import EXACT, FALSE_ALARM, REFUSED, TRACEBACK, WRONG, Row
from trust.models.truth import Truth, buffers_kept, find_truth, freeze_unreached, parameters_of, trained

SMALL, SQUARE = Size(), Size(batch=8)
"""The second has as many examples as tokens, so the length of an axis does not show a wrong batch axis. There the check
before training runs first."""
FEWER = (SQUARE.batch, 3, 1)
"""The sizes of the batches that are clipped after that check."""
SQUARED = "With as many examples as tokens:"
SEVERITY = (EXACT, REFUSED, FALSE_ALARM, WRONG, TRACEBACK)
DROPOUT = 0.2
TOLERANCE = 1e-8
LEAST = 1e-8
"""The smallest threshold, as the engine raises norms below 1e-10 to 1e-10."""
T = TypeVar("T")


@dataclass(frozen=True)
class Mode:
    """How an engine is attached: the partition of a model, and how norms are computed."""

    partition: Callable[[nn.Module], Partition]
    norms: str = "bookkeeping"

    def attach(
        self, model: nn.Module, thresholds: float | Tensor, partition: Partition | None = None
    ) -> ClippingEngine:
        """The engine on this model."""
        partition = partition or self.partition(model)
        return attach(model, partition, thresholds, norms=self.norms)  # type: ignore[arg-type]


MODE_BY_NAME = MappingProxyType({"flat": Mode(flat), "ghost": Mode(flat, "ghost"), "per_layer": Mode(per_layer)})


@dataclass(frozen=True)
class Known:
    """The reference for all modes of one architecture: the truth at each size (None if examples mix), and the names of
    the parameters that no loss reaches."""

    truth: Mapping[Size, Truth | None]
    frozen: tuple[str, ...]


def build(architecture: Architecture, size: Size, dtype: torch.dtype, frozen: tuple[str, ...] = ()) -> Subject:
    """A deterministic model and batch, in train mode, with slightly perturbed weights, so that none is 0 or 1."""
    torch.manual_seed(0)
    built = architecture.make(size)
    model = built.model.to(dtype).train()
    batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in built.batch.items()}
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return Subject(model, batch, built.losses)


def compute_known(architecture: Architecture) -> Known:
    """Compute the truth of an architecture with plain autograd."""
    truth: dict[Size, Truth | None] = {}
    subject = build(architecture, SMALL, torch.float64)
    with in_double():
        frozen = tuple(freeze_unreached(subject))
    for size in (SMALL, SQUARE):
        subject = build(architecture, size, torch.float64, frozen)  # in_double would change the random numbers
        with in_double():
            truth[size] = None if architecture.mixes else find_truth(subject)
    return Known(truth, frozen)


def check(architecture: Architecture, mode: str, known: Known) -> Row:
    """One row, the worse result of both sizes. Any exception becomes part of the row."""
    rows = []
    for size in (SMALL, SQUARE):
        status, note, found = attempt(partial(_compare, architecture, MODE_BY_NAME[mode], known, size))
        row = found or Row(architecture.family, architecture.name, "", status, note=note)
        rows.append(row if size is SMALL or not row.note else replace(row, note=f"{SQUARED} {row.note}"))
    row = replace(max(rows, key=lambda row: SEVERITY.index(row.status)), mode=mode)
    if row.status != EXACT:
        return row
    dropped, note, _ = attempt(partial(_with_dropout, architecture, MODE_BY_NAME[mode], known))
    return replace(row, error=max(row.error or 0.0 for row in rows), dropout=dropped or "taken", note=note)


def attempt(action: Callable[[], T]) -> tuple[str, str, T | None]:
    """(status, note, result): refused and the message, traceback and its place, or "" and the result of the action."""
    try:
        return "", "", action()
    except _FalseAlarm as error:
        return FALSE_ALARM, message(error, 600), None
    except UserError as error:
        return REFUSED, message(error, 600), None
    except _Wrong as error:
        return WRONG, str(error), None
    except Exception as error:
        return TRACEBACK, f"{type(error).__name__}: {message(error, 300)} ({place(error)})", None


class _Wrong(Exception):
    """The engine's result is wrong."""


class _FalseAlarm(UserError):
    """`verify` refuses a model that is clipped exactly."""


def place(error: BaseException) -> str:
    """file:line where the exception was raised, and the last line of groupwise that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "groupwise" in Path(frame.filename).parts]
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (frames[-1], *ours[-1:])]
    return ", from ".join(dict.fromkeys(lines))


def _compare(architecture: Architecture, mode: Mode, known: Known, size: Size) -> Row:
    """Compare the engine with the truth in one backward pass; at the second size, run the check before training first,
    then compare several batches. The row is the worst result."""
    truth, subject = known.truth[size], build(architecture, size, torch.float64, known.frozen)
    partition = mode.partition(subject.model)
    with mode.attach(subject.model, 1.0, partition) as engine:
        refusal = _check_first(engine, subject, verified=truth is None or size is SQUARE)
        if refusal is not None:
            alarm = size is SQUARE and truth is not None and _is_exact(architecture, mode, known)
            raise _FalseAlarm(message(refusal, 600)) if alarm else refusal
        if truth is None:
            raise _Wrong("Its examples mix, but it was not refused.")
        batches = FEWER if size is SQUARE else (size.batch,)
        found = [_clip(engine, subject, truth.first(n), n) for n in batches]
    error, note = max(found, key=lambda pair: (bool(pair[1]), pair[0]))
    return Row(architecture.family, architecture.name, "", WRONG if note else EXACT, error, note=note)


def _clip(engine: ClippingEngine, subject: Subject, truth: Truth, examples: int) -> tuple[float, str]:
    """Clip the first examples in one backward pass; returns the largest error and a description of it, or ""."""
    model = subject.model
    groups = parameters_of(model, tuple(group.layers for group in engine.partition))
    norms = truth.norms(groups)
    thresholds = choose_thresholds(norms)
    engine.set_thresholds(thresholds)
    engine.reset()
    model.zero_grad()
    with buffers_kept(model), in_double():
        engine.clip(partial(losses_of, subject), range(examples))
    sums = {name: parameter.grad for name, parameter in trained(model).items()}
    error, where = compare(sums, engine.per_example_norms, truth, groups, thresholds)
    if not error < TOLERANCE:
        return error, f"{where} is off by {error:.0e}."
    counted = torch.equal(engine.counts, (norms <= thresholds[:, None]).sum(1).double())
    return error, "" if counted else "The counts are wrong."


def _is_exact(architecture: Architecture, mode: Mode, known: Known) -> bool:
    """Whether the engine is exact at the size whose shapes show the batch axis."""
    _, _, row = attempt(partial(_compare, architecture, mode, known, SMALL))
    return row is not None and row.status == EXACT


def _check_first(engine: ClippingEngine, subject: Subject, verified: bool) -> UserError | None:
    """Run the trace and the check before training, as `make_private` does; returns the refusal, or None."""
    examples = range(len(next(iter(subject.batch.values()))))
    losses = partial(losses_of, subject)
    try:
        with in_double():
            engine.trace(losses, examples)
            if verified:
                verify(engine, losses, examples)
    except UserError as error:
        return error
    return None


def losses_of(subject: Subject, rows: Sequence[int]) -> Tensor:
    """The losses of these examples, (n,)."""
    return subject.losses(subject.model, {name: values[list(rows)] for name, values in subject.batch.items()})


def choose_thresholds(norms: Tensor) -> Tensor:
    """Slightly above the median norm of each group, (K,); for groups without gradients, a share of the total norm."""
    total = norms.square().sum(0).sqrt().median()
    return torch.maximum(1.01 * norms.median(1).values, 1e-4 * total).clamp_min(LEAST)


def compare(
    sums: Mapping[str, Tensor | None], norms: Tensor, truth: Truth, groups: list[list[str]], thresholds: Tensor
) -> tuple[float, str]:
    """The largest error, and its location: a clipped sum, relative to Σ_i min(‖g_k^(i)‖, C_k), or a squared norm,
    relative to max(‖g_k^(i)‖, C_k)². Infinite if a shape is wrong or a value is NaN."""
    right, expected = truth.norms(groups), truth.sums(groups, thresholds)
    if norms.shape != right.shape:
        return math.inf, f"The shape of the norms, {tuple(norms.shape)} for {tuple(right.shape)},"
    scale = torch.maximum(right, thresholds[:, None]).square()
    errors = {"A norm": float(((norms.square() - right.square()).abs() / scale).max() / 2)}
    clipped = torch.minimum(right, thresholds[:, None]).sum(1)
    floors = torch.maximum(clipped, 1e-2 * thresholds)  # for groups whose gradients are zero up to rounding
    for names, floor in zip(groups, floors.tolist(), strict=True):
        for name in names:
            found = sums[name]
            off = math.inf if found is None else float((found - expected[name]).norm()) / floor
            errors[f"The clipped sum of '{name}'"] = off
    where = max(errors, key=lambda what: math.inf if math.isnan(errors[what]) else errors[what])
    return (math.inf if math.isnan(errors[where]) else errors[where]), where


def _with_dropout(architecture: Architecture, mode: Mode, known: Known) -> None:
    """Take a step with dropout and thresholds that clip nothing: sums must be finite, and all examples counted."""
    subject = build(architecture, replace(SMALL, dropout=DROPOUT), torch.float64, known.frozen)
    with mode.attach(subject.model, 1e9) as engine, in_double():
        engine.trace(partial(losses_of, subject), range(SMALL.batch))
        engine.clip(partial(losses_of, subject), range(SMALL.batch))
        for name, parameter in trained(subject.model).items():
            if parameter.grad is None or not bool(torch.isfinite(parameter.grad).all()):
                raise _Wrong(f"With dropout the sum of {name} is not finite.")
        if not bool((engine.counts == SMALL.batch).all()):
            raise _Wrong(f"With dropout {engine.counts.tolist()} of {SMALL.batch} examples are counted.")


@contextmanager
def in_double() -> Iterator[None]:
    """Within it, `.float()`, `torch.float32` and the default dtype mean float64, in forward and backward passes.

    Many models compute rotary positions, RMS norms and softmaxes in float32, whose rounding (1e-7 of a gradient) would
    hide small errors of a clipped sum. Float32 in the engine itself is not detected here, but in the tests of the
    library.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        for owner, name in ((torch, "float32"), (torch, "float")):
            stack.enter_context(patch.object(owner, name, torch.float64))
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
