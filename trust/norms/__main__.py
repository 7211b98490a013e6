"""Measures how far norms are under-stated, and a clipped example exceeds its threshold: `python -m trust.norms`.

For every way to a norm (trust/norms/cases.py) one example's inputs and output gradients are drawn from laws that are
hard on sums. The norm that the engine states, and the length of what it adds to `.grad`, are compared with the norm of
the float64 gradient. Exit code 1 where a norm is under-stated, or a threshold exceeded, by more than 1e-6 of it.
"""

import argparse
import copy
import csv
import io
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from groupwise.atomic import write_text
from groupwise.clipping import attach, flat, per_layer
from trust.norms.cases import CASES, Case

RESULT = Path(__file__).resolve().parents[2] / "results" / "trust" / "norms.csv"
ALLOWED = 1e-6
SHARE = 0.37
"""The threshold, as a share of the true norm."""


def _student(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) / torch.empty(shape).exponential_().sqrt_()  # so heavy a tail that there is no variance


def _spike(shape: tuple[int, ...]) -> Tensor:
    """One number of 1, and the others so small that all their squares together are as much."""
    numbers = torch.randn(shape)
    numbers *= numbers.numel() ** -0.5
    numbers.view(-1)[numbers.numel() // 3] = 1.0
    return numbers


LAWS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": torch.randn,
    "Student t of 2 degrees": _student,
    "log-normal": lambda shape: torch.randn(shape).mul_(2).exp_(),
    "one spike": _spike,
    "all equal": lambda shape: torch.full(shape, 1.1),
}


@dataclass(frozen=True)
class Row:
    """What was measured of one way and law.

    Args:
        formula: the case's name.
        entries: numbers of the gradient.
        law: of inputs and output gradients.
        understated: (true norm − stated norm)/true norm; below 0 where it was raised.
        over_threshold: (length of what was added to .grad)/C − 1.
    """

    formula: str
    entries: int
    law: str
    understated: float
    over_threshold: float

    @property
    def good(self) -> bool:
        """Whether both are within what is allowed."""
        return self.understated <= ALLOWED and self.over_threshold <= ALLOWED


def measure(case: Case, law: str, entries: int, seed: int = 0) -> Row:
    """One example through the engine, and through float64.

    Raises:
        RuntimeError: the engine went another way than the case is about.
    """
    torch.manual_seed(seed)
    model, shape = case.build(entries)
    draw = LAWS[law]
    inputs = torch.randint(0, shape[0], (1, *shape)) if case.indices else draw((1, *shape))
    with torch.no_grad():
        g = draw(tuple(model(inputs).shape))
    true = _true_norm(model, inputs, g)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "groupwise has no rule")
        engine = attach(model, (flat if case.flat else per_layer)(model), SHARE * true, **case.attach)
    with engine:
        engine.backward((model(inputs) * g).flatten(1).sum(1))
        stated = float(engine.per_example_norms[0, 0])
        added = _length([p.grad for p in model.parameters()])
        choices = engine.groups[0].members[0].context.choices
    chosen = None if choices.last is None else choices[choices.last].chosen
    if case.way is not None and chosen != case.way:
        raise RuntimeError(f"{case.name}: the engine chose {chosen}, not {case.way}")
    count = sum(p.numel() for p in model.parameters())
    return Row(case.name, count, law, 1 - stated / true, added / (SHARE * true) - 1)


def _true_norm(model: nn.Module, inputs: Tensor, g: Tensor) -> float:
    """Of the gradient that plain torch gets in float64."""
    double = copy.deepcopy(model).double()
    outputs = double(inputs.double() if inputs.is_floating_point() else inputs)
    return _length(list(torch.autograd.grad(outputs, list(double.parameters()), g.double())))


def _length(gradients: Sequence[Tensor | None]) -> float:
    """Of all of them together, added up in float64, some numbers at a time."""
    total = 0.0
    for gradient in gradients:
        assert gradient is not None
        for part in gradient.reshape(-1).split(1 << 22):
            total += float(part.double().square_().sum())
    return total**0.5


def as_csv(rows: Sequence[Row]) -> str:
    """The file of the results: what was measured to three digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    for row in rows:
        writer.writerow(f"{value:.2e}" if isinstance(value, float) else value for value in astuple(row))
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the table when everything was measured; 1 where a row is not good."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m trust.norms", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--most", type=int, help="leave out layers of more parameters than this: a fast look")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES:
        if case.name not in (options.only or names):
            continue
        for entries in case.entries:
            if entries > (options.most or entries):
                continue
            start = time.monotonic()
            for law in LAWS:
                rows.append(measure(case, law, entries))
                print(",".join(f"{v:.2e}" if isinstance(v, float) else str(v) for v in astuple(rows[-1])))
            print(f"{case.name}, {entries}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if not options.only and options.most is None:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        write_text(RESULT, as_csv(rows))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
