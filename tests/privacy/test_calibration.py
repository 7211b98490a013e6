"""σ of the paper's cells against an independent table, and the search that finds it."""

import math

import pytest

from groupwise.errors import UserError
from groupwise.privacy import calibration, prv
from groupwise.privacy.accounting import epsilon_bounds
from groupwise.privacy.calibration import TOLERANCE, Calibration, calibrate, calibrate_noise_multiplier

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
FAST = {("cifar10", 3), ("sst2", 3), ("samsum", 1)}


def _cells() -> list:
    cells = []
    for name, (rate, steps, delta, sigmas) in CELLS.items():
        for epsilon, sigma in sigmas.items():
            marks = () if (name, epsilon) in FAST else (pytest.mark.slow,)
            cells.append(pytest.param(epsilon, delta, rate, steps, sigma, marks=marks, id=f"{name}, eps {epsilon}"))
    return cells


@pytest.mark.parametrize(("epsilon", "delta", "rate", "steps", "golden"), _cells())
def test_the_papers_cells(epsilon, delta, rate, steps, golden):
    found = calibrate(epsilon, delta, rate, steps)
    assert found.note == ""
    assert found.noise_multiplier == pytest.approx(golden, rel=5e-3)
    assert (1 - TOLERANCE) * epsilon <= found.epsilon_upper <= epsilon
    assert epsilon_bounds(found.noise_multiplier, rate, steps, delta).upper == found.epsilon_upper


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
@pytest.mark.parametrize("sigma", [0.9, 4.0])
def test_there_and_back_again(accountant, sigma):
    epsilon = epsilon_bounds(sigma, 0.02, 300, 1e-5, accountant).upper
    found = calibrate_noise_multiplier(epsilon, 1e-5, 0.02, 300, accountant)
    assert found == pytest.approx(sigma, rel=2e-3)


def test_rdp_asks_for_more_noise():
    setting = (3.0, 1e-5, 0.02, 300)
    assert calibrate_noise_multiplier(*setting, "rdp") > 1.02 * calibrate_noise_multiplier(*setting, "prv")


@pytest.mark.slow
def test_pld_can_be_asked_for():
    found = calibrate(3.0, 1e-5, 0.02, 50, "pld")
    assert found.epsilon_upper <= 3.0
    assert found.noise_multiplier == pytest.approx(calibrate_noise_multiplier(3.0, 1e-5, 0.02, 50), rel=5e-3)


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"),
    [
        (2.0, 1.0, 30),
        (1.0, 0.5, 1),
        (6.0, 1e-3, 3),
        pytest.param(0.05, 0.01, 100, marks=pytest.mark.slow),
        pytest.param(40.0, 0.01, 500, marks=pytest.mark.slow),
    ],
)
def test_odd_targets_are_met_without_being_passed(epsilon, rate, steps):
    found = calibrate(epsilon, 1e-5, rate, steps)
    assert (1 - TOLERANCE) * epsilon <= found.epsilon_upper <= epsilon


def test_a_prv_failure_is_made_good_by_pld_and_noted(monkeypatch):
    def fail(*_):
        raise RuntimeError("Discrete mean differs from continuous mean significantly.")

    prv._coarse.cache_clear()
    monkeypatch.setattr(prv, "_compose", fail)
    found = calibrate(0.5, 1e-5, 1.0, 4)
    assert "PLD" in found.note
    assert found.epsilon_upper <= 0.5
    assert calibrate(0.5, 1e-5, 1.0, 4) == found, "the note survives the cache"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ((0.0, 1e-5, 0.1, 10), "epsilon"),
        ((-1.0, 1e-5, 0.1, 10), "epsilon"),
        ((math.nan, 1e-5, 0.1, 10), "epsilon"),
        ((math.inf, 1e-5, 0.1, 10), "epsilon"),
        ((1.0, 0.0, 0.1, 10), "delta"),
        ((1.0, 1e-5, 1.5, 10), "sample_rate"),
        ((1.0, 1e-5, 0.1, 0), "steps"),
        ((1.0, 0.02, 0.001, 10), "publishing the drawn examples"),
        ((1.0, 1e-5, 0.1, 10, "gdp"), "accountant"),
    ],
)
def test_refusals(setting, reason):
    with pytest.raises(UserError, match=reason):
        calibrate(*setting)


class TestCache:
    SETTING = (2.0, 1e-5, 0.1, 20, "rdp")

    @pytest.fixture
    def searches(self, monkeypatch):
        """The settings that were searched for, rather than read."""
        done = []

        def search(epsilon, *others):
            done.append((epsilon, *others))
            return Calibration(1.25, 0.999 * epsilon, "note")

        monkeypatch.setattr(calibration, "_search", search)
        return done

    def test_the_second_time_is_read(self, searches, own_cache):
        first = calibrate(*self.SETTING)
        assert calibrate(*self.SETTING) == first
        assert len(searches) == 1
        assert len(list(own_cache.rglob("*.json"))) == 1

    def test_every_argument_is_part_of_the_key(self, searches):
        settings = [
            self.SETTING,
            (2.1, 1e-5, 0.1, 20, "rdp"),
            (2.0, 2e-5, 0.1, 20, "rdp"),
            (2.0, 1e-5, 0.11, 20, "rdp"),
            (2.0, 1e-5, 0.1, 21, "rdp"),
            (2.0, 1e-5, 0.1, 20, "prv"),
        ]
        for setting in settings * 2:
            calibrate(*setting)
        assert len(searches) == len(settings)

    def test_other_library_versions_search_again(self, searches, monkeypatch):
        calibrate(*self.SETTING)
        monkeypatch.setattr(calibration, "_version", lambda name: "another")
        calibrate(*self.SETTING)
        assert len(searches) == 2

    @pytest.mark.parametrize("text", ["", "{", "null", "[1, 2]", '{"key": 1}', '"text"', "\\xff"])
    def test_a_broken_file_is_searched_for_and_mended(self, searches, own_cache, text):
        first = calibrate(*self.SETTING)
        (file,) = own_cache.rglob("*.json")
        file.write_bytes(text.encode("latin-1"))
        assert calibrate(*self.SETTING) == first
        assert calibrate(*self.SETTING) == first
        assert len(searches) == 2

    @pytest.mark.parametrize("value", [["nan", 1.0, ""], [-1.0, 1.0, ""], [1.0, 2.5, ""], [1.0], 3.0, None])
    def test_a_value_that_proves_nothing_is_not_believed(self, monkeypatch, searches, value):
        monkeypatch.setattr(calibration, "read_cache", lambda kind, key: value)
        assert calibrate(*self.SETTING).epsilon_upper <= 2.0
        assert len(searches) == 1

    def test_it_can_be_left_out(self, searches, own_cache):
        calibrate(*self.SETTING, cache=False)
        calibrate(*self.SETTING, cache=False)
        assert len(searches) == 2
        assert not own_cache.exists()
