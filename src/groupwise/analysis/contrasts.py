"""Differences between cells that have all else in common, paired over their other settings and seeds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from groupwise.analysis.paper import settings_of

Settings = Mapping[str, str]


@dataclass(frozen=True)
class Contrast:
    """A difference of `metric` between cells of one sweep.

    Attributes:
        sweep: whose cells.
        plus: settings of the cells that count positively, such as {"clip": "flat"}; several are added up.
        minus: settings of those that are subtracted.
        where: settings that all of them have.
        metric: the column of measured rows.
    """

    sweep: str
    plus: tuple[Settings, ...]
    minus: tuple[Settings, ...]
    where: Settings = field(default_factory=dict)
    metric: str = "valid/accuracy"

    @property
    def terms(self) -> tuple[tuple[int, Settings], ...]:
        return (*((1, settings) for settings in self.plus), *((-1, settings) for settings in self.minus))

    def uses(self, cell: str) -> bool:
        """Is that cell one of its own?"""
        found = settings_of(cell).items()
        return self.where.items() <= found and any(settings.items() <= found for _, settings in self.terms)


class Differences(NamedTuple):
    """What a contrast comes to: a difference for each pair, and what is behind them."""

    differences: list[float]
    unpaired: int
    """Places (other settings and seed) at which some of the cells have a value and others none."""
    means: list[float]
    """Of each term, over the pairs."""


def differences(contrast: Contrast, values: Mapping[tuple[str, int], float]) -> Differences:
    """The contrast at each place where all of its cells have a value; `values` is by cell and seed.

    A place is a seed with all settings but those that the contrast varies. Sorted by place, so the order of `values`
    does not matter.
    """
    varied = {key for _, settings in contrast.terms for key in settings}
    places: dict[tuple[tuple[tuple[str, str], ...], int], dict[int, float]] = {}
    for (cell, seed), value in values.items():
        found = settings_of(cell)
        if not contrast.where.items() <= found.items():
            continue
        rest = tuple(sorted((key, text) for key, text in found.items() if key not in varied))
        for number, (_, settings) in enumerate(contrast.terms):
            if settings.items() <= found.items():
                places.setdefault((rest, seed), {})[number] = value
    whole = [places[at] for at in sorted(places) if len(places[at]) == len(contrast.terms)]
    signs = [sign for sign, _ in contrast.terms]
    return Differences(
        [sum(sign * at[number] for number, sign in enumerate(signs)) for at in whole],
        len(places) - len(whole),
        [sum(at[number] for at in whole) / len(whole) for number in range(len(signs))] if whole else [],
    )
