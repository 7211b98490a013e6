"""The report of what was spent: which figure is quoted, and how it is written down."""

import dataclasses
import json
import math

import pytest

from groupwise.privacy.accountants import EpsilonBounds
from groupwise.privacy.plan import EpsilonReport

BOUNDS = EpsilonBounds(2.9, 3.0, 3.1)


def test_the_quoted_epsilon_is_always_an_upper_bound():
    quoted = {name: EpsilonReport(9, 1e-5, name, BOUNDS, 3.5, 3.05, True).epsilon for name in ("prv", "pld", "rdp")}
    assert quoted == {"prv": 3.1, "pld": 3.05, "rdp": 3.5}


def test_it_is_json_even_when_infinite():
    endless = EpsilonBounds(math.inf, math.inf, math.inf)
    written = EpsilonReport(9, 1e-5, "prv", endless, math.inf, None, False).to_dict()
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert (written["epsilon"], written["prv"]["upper"], written["pld"]) == ("inf", "inf", None)


def test_pld_is_quoted_only_where_it_was_asked_for_and_answered():
    assert EpsilonReport(9, 1e-5, "pld", BOUNDS, 3.5, None, True).epsilon == 3.1
    assert EpsilonReport(9, 1e-5, "prv", BOUNDS, 3.5, 3.05, True).epsilon == 3.1


def test_neither_bounds_nor_report_can_be_changed():
    report = EpsilonReport(9, 1e-5, "prv", BOUNDS, 3.5, None, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rdp = 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        BOUNDS.upper = 0.1
    assert BOUNDS.note == ""
