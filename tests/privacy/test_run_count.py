"""The number of runs of a search: its law, its mean, and that a draw follows it."""

import math
from collections import Counter
from decimal import localcontext
from fractions import Fraction
from itertools import islice

import pytest
from scipy import stats

from groupwise.errors import UserError
from groupwise.privacy.tuning import BITS, TruncatedNegativeBinomial


def first(law, count):
    with localcontext(prec=50):
        return {k: float(p) for k, p in islice(law.probabilities(), count)}


@pytest.mark.parametrize(
    ("law", "known"),
    [
        (TruncatedNegativeBinomial(1.0, 0.2), stats.geom(0.2)),
        (TruncatedNegativeBinomial(0.0, 0.05), stats.logser(0.95)),
    ],
)
def test_the_laws_that_have_names(law, known):
    for k, probability in first(law, 60).items():
        assert probability == pytest.approx(known.pmf(k), rel=1e-10)
    assert law.mean == pytest.approx(known.mean(), rel=1e-12)


@pytest.mark.parametrize("eta", [-0.9, -0.5, -1e-9, 0.0, 1e-9, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("gamma", [0.05, 0.9])
def test_probabilities_make_one_and_the_mean(eta, gamma):
    law = TruncatedNegativeBinomial(eta, gamma)
    table = first(law, 800)
    assert min(table) == 1 and min(table.values()) >= 0
    assert math.fsum(table.values()) == pytest.approx(1.0, abs=1e-12)
    assert math.fsum(k * p for k, p in table.items()) == pytest.approx(law.mean, rel=1e-9)
    # the generating function, whose derivative the bound is made of
    x = 0.6
    power = ((1 - (1 - gamma) * x) ** -eta - 1) / (gamma**-eta - 1) if abs(eta) > 1e-6 else None
    if power is not None:
        assert math.fsum(p * x**k for k, p in table.items()) == pytest.approx(power, rel=1e-10)


def test_a_draw_inverts_the_distribution():
    law = TruncatedNegativeBinomial(0.0, 0.05)
    share, below = Fraction(0), []
    for p in first(law, 3).values():
        share += Fraction(p)
        below.append(share)
    assert [law.draw(lambda bits, at=at: int(at * 2**BITS) - 2**220) for at in below] == [1, 2, 3]
    assert law.draw(lambda bits: 0) == 1
    assert law.draw(lambda bits: 2**bits - 1) > 100


def test_draws_follow_the_law():
    """χ² at an error rate of 1e-6; the other law's table rejects."""
    law = TruncatedNegativeBinomial(0.0, 0.1)
    counts = Counter(law.draw() for _ in range(3000))
    table = first(law, 12)

    def p_value(expected):
        cells = {k: p for k, p in expected.items() if 3000 * p > 5}
        seen = [counts[k] for k in cells] + [3000 - sum(counts[k] for k in cells)]
        wanted = [3000 * p for p in cells.values()] + [3000 * (1 - sum(cells.values()))]
        return stats.chisquare(seen, wanted).pvalue

    assert p_value(table) > 1e-6
    assert p_value(first(TruncatedNegativeBinomial(0.3, 0.1), 12)) < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda: TruncatedNegativeBinomial(-1.0, 0.5),
        lambda: TruncatedNegativeBinomial(math.nan, 0.5),
        lambda: TruncatedNegativeBinomial(0.0, 1.0),
        lambda: TruncatedNegativeBinomial(0.0, 0.0),
        lambda: TruncatedNegativeBinomial.with_mean(0.0, 1.0),
        lambda: TruncatedNegativeBinomial.with_mean(-0.99, 1000.0),
    ],
)
def test_what_is_no_law_is_refused(make):
    with pytest.raises(UserError, match="give"):
        make()
