"""One-run audits of the training code pass correct clipping and detect wrong clipping."""

import numpy as np
import pytest

from groupwise.audit import one_run as game
from groupwise.audit.__main__ import MODES, audit_mode, everything, main, row_of
from groupwise.audit.options import make_setting
from groupwise.privacy import mechanism

QUICK = ["privacy.noise_multiplier=1.0", "privacy.accountant=rdp"]


@pytest.mark.parametrize("design", ["full", "poisson"])
def test_correct_training_keeps_its_claim_with_a_nontrivial_bound(design):
    finding = audit_mode(make_setting(["clip=adaptive_layer", *QUICK], design=design, canaries=2000))
    assert finding.kept and finding.bound > 0.2 * finding.plan.epsilon


def test_unclipped_layer_breaks_the_claim(monkeypatch):
    """The engine uses clip factors of 1 for the first group."""
    make = game.make_engine

    def without_first_clip(model, clip):
        engine = make(model, clip)
        object.__setattr__(engine.groups[0], "clip_rule", lambda norms, threshold: norms * 0 + 1)
        return engine

    monkeypatch.setattr(game, "make_engine", without_first_clip)
    monkeypatch.setattr("groupwise.build.verify", lambda *_, **__: None)
    finding = audit_mode(
        make_setting(["clip=fixed_layer", "privacy.epsilon=1", "privacy.accountant=rdp"], canaries=2000)
    )
    assert not finding.kept


def test_adaptive_modes_in_a_pipeline_keep_their_own_starting_threshold():
    setting = make_setting(["clip=adaptive_layer", "pipeline.stages=2"])
    assert (setting.config.pipeline.stages, setting.config.clip.initial_threshold) == (2, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["per_device", "adaptive_device"])
def test_pipeline_of_two_processes_is_audited(mode):
    finding = audit_mode(make_setting([f"clip={mode}", *QUICK], canaries=2000))
    assert finding.kept and finding.bound > 0.2 * finding.plan.epsilon and finding.plan.num_groups == 2


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1, 3, 8])
def test_every_mode_keeps_its_claim_and_reaches_a_third_of_it(epsilon):
    asked = [[f"clip={mode}", f"privacy.epsilon={epsilon}"] for mode in MODES]
    found = [audit_mode(make_setting(overrides, seed=100 * epsilon + k)) for k, overrides in enumerate(asked)]
    assert all(finding.kept and finding.bound > 0.1 * epsilon for finding in found)
    assert np.mean([finding.bound for finding in found]) > 0.3 * epsilon


def test_same_seed_gives_the_same_audit():
    asked = make_setting(["clip=flat", *QUICK], canaries=500, seed=5)
    assert row_of(audit_mode(asked)) == row_of(audit_mode(asked))


def test_audits_are_distinct():
    assert len(everything()) == len({str(cell) for cell in everything()}) > 50


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clip=none"], "no epsilon to audit"),
        (["privacy=shuffle"], "no guarantee"),
        (["privacy.epsilon=inf"], "Without noise"),
        (["model=gpt2_tiny"], "give task=sst2"),
        (["task=sst2", "train.steps=3"], "cannot be set"),
        (["task=sst2", "--canaries", "20"], "leave out --canaries"),
        (["task=sst2", "--plays", "1"], "--plays 1"),
        (["task=cifar", "data.train_limit=1"], "data.train_limit=2"),
        (["task=samsum_pipeline"], "one process"),
        (["--design", "worlds"], "give task=sst2"),
        (["optim.learning_rate=3"], "cannot be set"),
        (["clip"], "clip"),
        (["clip=nothing"], "clip=nothing is not one of"),
        (["clip.treshold=3"], "clip.threshold"),
        (["--design", "none"], "--design: invalid choice: 'none'"),
        (["--design", "counts", "clip=flat"], "clip=adaptive_layer"),
        (["--canaries", "3"], "--canaries 3"),
        (["--canaries", "x"], "--canaries"),
        (["--canaries", "100", "--design", "counts", "clip=adaptive_layer"], "power of two"),
        (["--canaries", "2048", "--design", "counts", "clip=adaptive_layer"], "to 1024"),
        (["--all", "clip=flat"], "--all chooses"),
        (["clip=flat", "noise=equal_budget", "seed=3"], "cannot be set"),
    ],
)
def test_invalid_audit_gives_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert words in printed.err


def test_exit_code_is_one_for_a_bound_above_the_claim(monkeypatch, capsys):
    asked = ["clip=flat", "privacy.epsilon=1", "privacy.accountant=rdp", "--canaries", "500"]
    assert main(asked) == 0
    assert "no bound above the claim" in capsys.readouterr().out
    monkeypatch.setattr(mechanism, "noise_stds", lambda c, *_, **__: c * 1e-3)
    assert main(asked) == 1
    assert "BROKEN" in capsys.readouterr().out
