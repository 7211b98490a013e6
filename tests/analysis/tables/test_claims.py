"""Claims are judged by paired differences and their intervals; missing or uninformative rows leave them undecided."""

import math
import shutil
from dataclasses import replace

import pytest
import yaml

from groupwise.analysis.claims import ALIKE, CLAIMS, LESS, MORE, NO_WORSE, SEARCH, Claim
from groupwise.analysis.findings import AGREEMENT, DISAGREEMENT, UNDECIDED, decide, findings_page, judge, summary
from groupwise.analysis.results import SHOWN, Folders, read_all, settings_of
from groupwise.analysis.statistics import Contrast, differences, holm, p_trend
from groupwise.analysis.tables import main
from groupwise.errors import UserError
from groupwise.rows import between_markers
from groupwise.sweeps.cells import read_sweep

PROJECT = Folders.of_checkout()
CIFAR = {"task": "cifar"}
PAGE = "# Title\n<!-- begin summary: x -->\nstale\n<!-- end summary -->\nprose\n"


def claim(kind: str, plus=("fixed_layer",), minus=("flat",), sweep="adaptivity") -> Claim:
    terms = [tuple({"clip": name} for name in names) for names in (plus, minus)]
    return Claim("It is so", "CIFAR-10", Contrast(sweep, *terms, CIFAR), kind)


@pytest.mark.parametrize(
    ("kind", "center", "word"),
    [
        (LESS, -2.0, AGREEMENT),
        (LESS, 2.0, DISAGREEMENT),
        (LESS, 0.1, UNDECIDED),
        (LESS, -0.5, AGREEMENT),
        (MORE, 2.0, AGREEMENT),
        (MORE, -2.0, DISAGREEMENT),
        (ALIKE, 0.0, AGREEMENT),
        (ALIKE, 2.0, DISAGREEMENT),
        (ALIKE, -2.0, DISAGREEMENT),
        (ALIKE, 0.9, UNDECIDED),
        (NO_WORSE, 3.0, AGREEMENT),
        (NO_WORSE, 0.0, AGREEMENT),
        (NO_WORSE, -3.0, DISAGREEMENT),
        (NO_WORSE, -1.0, UNDECIDED),
    ],
)
def test_verdict_depends_on_the_sign_and_size_of_the_effect(world, kind, center, word):
    def value(cell, seed):
        return 60.0 + (cell["clip"] == "fixed_layer") * (center + (-0.1, 0.0, 0.1)[seed])

    world.write(world.rows("adaptivity", value=value), "adaptivity")
    (verdict,) = decide(judge(claim(kind), world.folders))
    assert verdict.word == word and verdict.measured.mean == pytest.approx(center)
    assert (verdict.why == "below a point") == ((kind, center) == (LESS, -0.5))
    assert (verdict.measured.n, verdict.places) == (3, 2)


def test_p_value_uses_one_number_per_seed(world):
    """Two budgets of three seeds are three independent values, not six."""

    def value(cell, seed):
        return 60.0 - (cell["clip"] == "fixed_layer") * (1, 2, 6)[seed]

    world.write(world.rows("adaptivity", value=value), "adaptivity")
    (verdict,) = decide(judge(claim(LESS), world.folders))
    assert verdict.word == UNDECIDED
    assert verdict.measured.low == pytest.approx(-3 - 4.30265 * 2.64575 / 3**0.5, abs=1e-3)


def test_effect_that_depends_on_epsilon_is_judged_at_each_epsilon(world):
    """A gain at ε = 3 and a loss at ε = 8 are not "alike" by their mean."""

    def value(cell, seed):
        sign = 1 if cell["privacy.epsilon"] == "3" else -1
        return 60.0 + (cell["clip"] == "fixed_layer") * (3 * sign + (-0.1, 0.0, 0.1)[seed])

    world.write(world.rows("adaptivity", value=value), "adaptivity")
    found = decide(judge(claim(ALIKE), world.folders))
    assert [(verdict.epsilon, verdict.word) for verdict in found] == [("3", DISAGREEMENT), ("8", DISAGREEMENT)]
    assert [verdict.paper for verdict in found] == pytest.approx([60.6 - 63.1, 67.8 - 73.9])


def test_reasons_for_undecided_claims(world):
    rows = world.rows("adaptivity")
    world.write(rows[rows["seed"] == 0], "adaptivity")
    (verdict,) = decide(judge(claim(LESS), world.folders))
    assert (verdict.word, verdict.why) == (UNDECIDED, "4 of 6 pairs were not run")
    same = world.rows("adaptivity", value=lambda cell, seed: 60.0 - 4 * (cell["clip"] == "fixed_layer"))
    world.write(same, "adaptivity")
    (verdict,) = decide(judge(claim(LESS), world.folders))
    assert (verdict.word, verdict.why) == (UNDECIDED, "the difference is the same for all seeds")
    (world.folders.measured / "constant_answers.csv").write_text("task,metric,value\ncifar,valid/accuracy,58.5\n")
    world.write(world.rows("adaptivity"), "adaptivity")
    (verdict,) = decide(judge(claim(LESS), world.folders))
    assert verdict.why == "privacy.epsilon=3 and privacy.epsilon=8: hardly learned: a constant prediction has 58.5"


def test_task_that_hardly_learned_is_left_out_and_leaves_the_claim_undecided(world):
    def value(cell: dict[str, str], seed: int) -> float:
        own = (50.0, 40.0) if cell["task"] == "sst2" else (60.0, 57.0)  # below the baseline, and a difference of 3
        return own[cell["clip"] == "fixed_layer"] + (-0.1, 0.0, 0.1)[seed] * (cell["clip"] == "flat")

    world.write(world.rows("adaptivity", value=value), "adaptivity")
    both = replace(claim(LESS), contrast=replace(claim(LESS).contrast, where={}))
    (verdict,) = decide(judge(both, world.folders))
    assert (verdict.word, verdict.places) == (UNDECIDED, 2) and verdict.measured.mean == pytest.approx(-3)
    places = " and ".join(f"model=roberta_base privacy.epsilon={epsilon} task=sst2" for epsilon in (3, 8))
    assert verdict.why == f"{places}: hardly learned: a constant prediction has 50.9"
    assert verdict.instead.endswith(f"without {places}")


@pytest.mark.parametrize(
    ("scale", "why"),
    [
        ({"seed": {2: None}}, "2 seeds, fewer than 3"),
        ({"seed": {1: None, 2: None}}, "one seed"),
        ({"privacy.epsilon": {3: None}}, "scale=mini leaves out 1 of 2 places"),
    ],
)
def test_settings_that_a_scale_leaves_out_leave_the_claim_undecided(world, scale, why):
    path = world.folders.sweeps / "adaptivity.yaml"
    content = yaml.safe_load(path.read_text().partition("\n")[2])
    content["scales"]["mini"] |= scale
    path.write_text("# Narrowed\n" + yaml.safe_dump(content))
    world.write(world.rows("adaptivity"), "adaptivity")
    (verdict,) = decide(judge(claim(LESS), world.folders))
    assert (verdict.word, verdict.why) == (UNDECIDED, why)


def test_budget_at_which_nothing_learned_is_left_out(world):
    def value(cell: dict[str, str], seed: int) -> float:
        learned = 60.0 - 3.0 * (cell["clip"] == "fixed_layer") + (-0.1, 0.0, 0.1)[seed] * (cell["clip"] == "flat")
        return learned if cell["privacy.epsilon"] == "8" else 11.0

    world.write(world.rows("adaptivity", value=value), "adaptivity")
    (verdict,) = decide(judge(claim(LESS), world.folders))
    assert (verdict.word, verdict.places) == (UNDECIDED, 1) and verdict.measured.mean == pytest.approx(-3)
    assert verdict.instead == "without privacy.epsilon=3" and "hardly learned" in verdict.why


def test_runs_of_a_seed_on_two_kinds_of_device_leave_the_claim_undecided(world):
    rows = world.rows("adaptivity")
    rows["system.device_type"] = rows["cell"].str.contains("clip=flat").map({True: "cuda", False: "cpu"})
    world.write(rows, "adaptivity")
    found = decide(judge(claim(LESS), world.folders))
    assert {(v.word, v.why) for v in found} == {(UNDECIDED, "runs of a seed are from a CPU and from a GPU")}


def test_unknown_constant_baseline_leaves_the_claim_undecided(world):
    world.write(world.rows("adaptivity"), "adaptivity")
    floors = world.folders.measured / "constant_answers.csv"
    floors.write_text("task,metric,value\nsst2,valid/accuracy,50.9\n")
    (verdict,) = decide(judge(claim(LESS), world.folders))
    assert (verdict.word, verdict.why) == (UNDECIDED, "the constant-prediction baseline is unknown")
    floors.unlink()
    assert decide(judge(claim(LESS), world.folders)) == [verdict]


def test_all_p_values_of_the_page_are_adjusted_together(world):
    assert holm([0.01, math.nan, 0.04, 0.03, 0.005]) == pytest.approx([0.03, math.nan, 0.06, 0.06, 0.02], nan_ok=True)
    world.write(world.rows("adaptivity"), "adaptivity")
    (alone,) = decide(judge(claim(LESS), world.folders))
    many = decide(judge(claim(LESS), world.folders) * 1000)
    assert alone.word == AGREEMENT and {verdict.word for verdict in many} == {UNDECIDED}
    assert many[0].p == pytest.approx(min(1, 1000 * alone.p))


def test_trend_between_two_levels_is_the_paired_t_test():
    assert math.isnan(p_trend([[1.0], [2.0]], [3, 8]))
    # Two levels: the paired t-test of their differences over seeds.
    from scipy.stats import ttest_1samp

    assert p_trend([[1.0, 2.0, 3.0], [1.5, 2.0, 5.0]], [3, 8]) == pytest.approx(ttest_1samp([0.5, 0.0, 2.0], 0).pvalue)


def test_scales_are_judged_separately_and_unpaired_runs_left_out(world):
    world.write(world.rows("adaptivity"), "adaptivity")
    rows = world.rows("adaptivity", "paper")
    world.write(rows[rows["seed"] == 0], "adaptivity", "paper")
    assert [verdict.scale for verdict in judge(claim(LESS), world.folders)] == ["paper", "mini"]
    world.write(rows[rows["cell"].str.contains("clip=flat")], "adaptivity", "paper")
    world.write(world.rows("adaptivity")[lambda table: table["seed"] != 1], "adaptivity")
    (verdict,) = judge(claim(LESS), world.folders)
    assert (verdict.scale, verdict.measured.n, verdict.why) == ("mini", 2, "2 of 6 pairs were not run")


def test_network_that_is_not_in_the_paper_is_counted_separately(world):
    shutil.copy(PROJECT.sweeps / "scatter_cnn.yaml", world.folders.sweeps)
    claims = [one for one in CLAIMS if one.contrast.sweep == "scatter_cnn"]
    spread = {"flat": 0.1, "fixed_layer": 0.2, "adaptive_layer": 0.4}
    rows = world.rows("scatter_cnn", "paper", lambda cell, seed: 60 + spread[cell["clip"]] * seed**2)
    world.write(rows, "scatter_cnn", "paper")
    found = [verdict for one in claims for verdict in judge(one, world.folders)]
    assert [(verdict.scale, verdict.places) for verdict in found] == [("paper", 1)] * 3
    assert summary(found).splitlines()[2:] == ["| networks that are not the paper's | 0 | 0 | 3 |"]
    assert findings_page(found).count("| CIFAR-10, scattering network | not the paper's | all | – |") == 3


def test_claim_without_rows_is_undecided(world):
    (verdict,) = judge(claim(LESS), world.folders)
    assert (verdict.word, verdict.scale, verdict.why) == (UNDECIDED, "", "no pairs of runs")
    assert summary([verdict]).splitlines()[-1] == "| none yet | 0 | 0 | 1 |"
    assert math.isnan(verdict.p)


def test_faulty_rows_leave_the_page_unchanged(world, tmp_path, capsys):
    world.write(world.rows("fixed_per_layer").assign(scale="paper"), "fixed_per_layer")
    (tmp_path / "findings.md").write_text(PAGE)
    options = ["--docs", str(tmp_path), "--out", str(tmp_path / "tables")]
    assert main(["findings", *options], world.folders) == 2
    assert "is not a cell and seed of the sweep fixed_per_layer at scale=mini" in capsys.readouterr().err
    assert (tmp_path / "findings.md").read_text() == PAGE and not any((tmp_path / "tables").iterdir())


def test_page_keeps_its_prose_and_is_deterministic(world, tmp_path):
    world.write(world.rows("adaptivity"), "adaptivity")
    found = decide([*judge(claim(LESS), world.folders), *judge(claim(MORE), world.folders)])
    once = between_markers(PAGE, "summary", summary(found), tmp_path)
    assert once.count("prose\n") == 1 and "stale" not in once
    assert "| scale=mini (reduced) | 1 | 1 | 0 |" in once
    assert "| It is so | CIFAR-10 | mini | all | −4.30 | −3.92 |" in findings_page(found)
    assert between_markers(once, "summary", summary(found), tmp_path) == once
    with pytest.raises(UserError, match="begin summary"):
        between_markers(PAGE.replace("begin summary", "begin nothing"), "summary", "", tmp_path)


HOLDS = {
    LESS: lambda effect: effect < 0,
    MORE: lambda effect: effect > 0,
    ALIKE: lambda effect: abs(effect) <= 1,
    NO_WORSE: lambda effect: effect >= -1,
}


def test_papers_own_numbers_fulfil_its_claims():
    found = [(each.says, v.paper, each.kind) for each in CLAIMS for v in judge(each, PROJECT)]
    printed = [(says, effect, kind) for says, effect, kind in found if not math.isnan(effect)]
    assert len(printed) > 20 and not [line for line in printed if not HOLDS[line[2]](line[1])]


def test_every_claim_selects_cells():
    for one in CLAIMS:
        names = [cell.name for cell in read_sweep(PROJECT.sweeps / f"{one.contrast.sweep}.yaml").cells("paper")]
        for _, settings in one.contrast.terms:
            wanted = (one.contrast.where | settings).items()
            assert any(wanted <= settings_of(name).items() for name in names), one


def runs_in_pairs(contrast: Contrast, rows) -> set[str]:
    """The hashes of the rows that the contrast compares."""
    at = {(cell, seed): run for cell, seed, run in zip(rows["cell"], rows["seed"], rows["hash"], strict=True)}
    pairs = differences(contrast, dict.fromkeys(at, 0.0)).index
    varied = {key for _, settings in contrast.terms for key in settings}

    def place(cell):
        return " ".join(sorted(word for word in cell.split() if word.partition("=")[0] not in varied))

    return {run for (cell, seed), run in at.items() if contrast.uses(cell) and (place(cell), seed) in pairs}


def test_every_pair_of_runs_of_a_claim_is_judged():
    names = [path.stem for path in sorted(PROJECT.sweeps.glob("*.yaml")) if not path.stem.startswith(SEARCH)]
    measured = [
        (name, at.rows)
        for name in names
        for at in read_all(read_sweep(PROJECT.sweeps / f"{name}.yaml"), PROJECT.measured)
        if at.scale in SHOWN
    ]
    for one in CLAIMS:
        same = [
            c.contrast for c in CLAIMS if (c.contrast.plus, c.contrast.minus) == (one.contrast.plus, one.contrast.minus)
        ]
        judged = {run for c in same for name, rows in measured if name == c.sweep for run in runs_in_pairs(c, rows)}
        for name, rows in measured:
            everywhere = Contrast(name, one.contrast.plus, one.contrast.minus)
            assert runs_in_pairs(everywhere, rows) <= judged, (
                f"add a claim about the sweep {name} to results/paper/claims.csv"
            )
