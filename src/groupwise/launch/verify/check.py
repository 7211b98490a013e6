"""What a check says: ok, FAILED, or not checked, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OK, FAILED, SKIPPED = "ok", "FAILED", "not checked"


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    result: str
    """`OK`, `FAILED` or `SKIPPED`."""
    detail: str


class Disagrees(Exception):
    """Two things that must agree do not; the text says which."""


class CannotTell(Exception):
    """There is nothing to compare with; the text says why."""


def perform(name: str, check: Callable[..., str], *arguments: Any) -> Check:
    """Run a check, which returns what it found, or raises `Disagrees` or `CannotTell`.

    A record that lacks what the check reads, or holds something else there, fails it.
    """
    try:
        return Check(name, OK, check(*arguments))
    except Disagrees as found:
        return Check(name, FAILED, str(found))
    except CannotTell as reason:
        return Check(name, SKIPPED, str(reason))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        first = (str(error).splitlines() or [""])[0]
        return Check(name, FAILED, f"the record cannot be read there ({type(error).__name__}: {first})")


def same(found: Mapping[str, Any], expected: Mapping[str, Any], where: str, against: str) -> None:
    """Raise `Disagrees` for the first key of `expected` that `found` has not with that value (numbers: to 1e-9)."""
    for key, value in expected.items():
        if key not in found:
            raise Disagrees(f"{where} has no {key}")
        if not equal(found[key], value):
            raise Disagrees(f"{where} has {key} = {found[key]}, and {against} has {value}")


def equal(one: Any, other: Any) -> bool:
    """Are they the same value? Infinity is written as "inf" here and there, and floats may be rounded to 1e-9."""
    numbers = [_number(value) for value in (one, other)]
    if None in numbers:
        return bool(one == other)
    a, b = numbers
    return bool(a == b or abs(a - b) <= 1e-9 * max(abs(a), abs(b)))  # type: ignore[operator, arg-type]


def table(checks: Iterable[Check]) -> str:
    """A Markdown table."""
    lines = ["| check | result | what was found |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {check.name} | {check.result} | {check.detail} |" for check in checks)])


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("inf", "Infinity") else None
