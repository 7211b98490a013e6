"""σ of the paper's cells against an independent table, and the search that finds it."""

import math

import pytest

from groupwise.errors import UserError
from groupwise.privacy import calibration
from groupwise.privacy.accountants import EpsilonBounds
from groupwise.privacy.accounting import epsilon_bounds
from groupwise.privacy.calibration import TOLERANCE, calibrate

SST2, QNLI, QQP, MNLI, SAMSUM = 67_349, 104_743, 363_846, 392_702, 14_732
GLUE_RATE = 1024 / SST2

# (ε, σ by the PLD accountant) of the paper's settings: rate, steps and δ as the paper has them.
CELLS = {
    "cifar10": (4096 / 50_000, 3662, 1e-5, {1: 18.612, 3: 6.957, 5: 4.499, 8: 3.074}),
    "sst2": (GLUE_RATE, 1315, SST2**-1.1, {3: 1.0774, 8: 0.7059}),
    "sst2, 3 epochs": (GLUE_RATE, 197, SST2**-1.1, {3: 0.7752, 8: 0.5519}),
    "sst2, 30 epochs": (GLUE_RATE, 1973, SST2**-1.1, {3: 1.2174, 8: 0.7587}),
    "qnli": (GLUE_RATE, 1315, QNLI**-1.1, {3: 1.0942, 8: 0.7134}),
    "qqp": (GLUE_RATE, 1315, QQP**-1.1, {3: 1.1398, 8: 0.7337}),
    "mnli": (GLUE_RATE, 1315, MNLI**-1.1, {3: 1.1426, 8: 0.7350}),
    "e2e": (1000 / 42_061, 421, 8e-6, {3: 1.0201, 8: 0.6800}),
    "dart": (1500 / 62_659, 627, 1e-5, {3: 1.1246, 8: 0.7237}),
    "samsum": (256 / SAMSUM, 288, SAMSUM**-1.1, {0.25: 3.804, 1: 1.327, 4: 0.722}),
}
FAST = {("cifar10", 3), ("samsum", 1)}

pytestmark = pytest.mark.usefixtures("cold")


def _cells() -> list:
    cells = []
    for name, (rate, steps, delta, sigmas) in CELLS.items():
        for epsilon, sigma in sigmas.items():
            marks = () if (name, epsilon) in FAST else (pytest.mark.slow,)
            cells.append(pytest.param(epsilon, delta, rate, steps, sigma, marks=marks, id=f"{name}, eps {epsilon}"))
    return cells


@pytest.mark.parametrize(("epsilon", "delta", "rate", "steps", "golden"), _cells())
def test_sigma_of_the_papers_cells_matches_the_table(epsilon, delta, rate, steps, golden):
    sigma, found = calibrate(epsilon, delta, rate, steps)
    assert found.note == ""
    assert sigma == pytest.approx(golden, rel=5e-3)
    assert (1 - TOLERANCE) * epsilon <= found.upper <= epsilon
    assert epsilon_bounds(sigma, rate, steps, delta).upper == found.upper


class TestSearch:
    """The search on curves with known answers, because each call of an accountant takes seconds."""

    @pytest.fixture
    def search(self, monkeypatch):
        """(curve, ε) -> the calibration, and every σ that was asked for."""

        def run(curve, epsilon=1.0):
            asked = []

            def bounds(sigma, *_):
                asked.append(sigma)
                return EpsilonBounds(0.0, curve(sigma), curve(sigma), "noted")

            monkeypatch.setattr(calibration, "epsilon_bounds", bounds)
            calibration._search.cache_clear()
            return calibrate(epsilon, 1e-5, 0.02, 300, "rdp"), asked

        return run

    @pytest.mark.parametrize(
        "curve",
        [
            lambda sigma: math.exp(5.0 - 5.0 * sigma),
            lambda sigma: sigma**-40.0,
            lambda sigma: 1.0 / sigma + 0.5 if sigma < 1.7 else 0.4 / sigma + 0.85 * (sigma < 40) * 0.9,
            lambda sigma: 50.0 if sigma < 3.0 else 0.99965 if sigma < 3.01 else 1e-3,  # a cliff with a narrow ledge
            lambda sigma: 4.0 if sigma < 9.0 else 9.0 / sigma * 0.9995,  # flat at first
            lambda sigma: 2.0 - 1e-4 * sigma if sigma < 50 else 49.975 / sigma,
            lambda sigma: 0.0 if sigma > 0.06 else 0.05995 / sigma,  # 0 at the first guess
        ],
    )
    def test_awkward_curves_are_solved(self, search, curve):
        (_, found), asked = search(curve)
        assert 0.999 <= found.upper <= 1.0
        assert len(asked) <= 40

    @pytest.mark.parametrize("below", [0.5, 0.0])
    def test_a_curve_that_jumps_over_the_target_is_solved_from_below(self, search, below):
        (sigma, found), _ = search(lambda sigma: 2.0 if sigma < 3 else below)
        assert found.upper == below
        assert 3.0 <= sigma <= 3.0 * (1 + 2e-6)

    def test_a_target_that_no_noise_meets_is_refused_at_the_bounds_of_the_search(self, search):
        for found, low, high in ((2.0, 1e11, 1e12), (0.5, 1e-9, 1e-8)):
            asked = []
            with pytest.raises(UserError, match="no noise multiplier"):
                search(lambda sigma, asked=asked, found=found: asked.append(sigma) or found)
            assert all(1e-9 < sigma < 1e12 for sigma in asked)
            assert any(low < sigma < high for sigma in asked)


@pytest.mark.parametrize(
    "setting", [(3.0, 1e-5, 0.02, 300), pytest.param((0.3, 1e-5, 0.01, 100), marks=pytest.mark.slow)]
)
def test_a_calibration_takes_at_most_four_bounds_and_rdp_needs_more_noise(monkeypatch, setting):
    real, asked = calibration.epsilon_bounds, []
    monkeypatch.setattr(calibration, "epsilon_bounds", lambda *a: asked.append(a) or real(*a))
    sigma, _ = calibrate(*setting)
    assert 1 <= len(asked) <= 4
    assert calibrate(*setting, "rdp")[0] > 1.02 * sigma


def test_a_delta_that_sampling_alone_guarantees_is_refused():
    drawn_ever = -math.expm1(10 * math.log1p(-0.001))
    with pytest.raises(UserError, match="Publishing the drawn examples"):
        calibrate(1.0, drawn_ever, 0.001, 10, "rdp")
    assert calibrate(1.0, 0.5 * drawn_ever, 0.001, 10, "rdp")[0] > 0
    assert calibrate(1.0, 0.4, 1.0, 10, "rdp")[0] > 0  # everything is drawn: no such limit
