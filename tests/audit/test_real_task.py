"""Two-worlds audits of a real task, with its model, data and dropout, pass correct noise and detect too little."""

import pytest
import torch

from groupwise.audit import two_worlds as real
from groupwise.audit.__main__ import audit_mode, describe, row_of
from groupwise.audit.options import make_setting
from groupwise.privacy import mechanism
from groupwise.tasks import text_classification
from tests.checked import checked_once
from tests.made_up import made_up_once

RATES = ("model.dropout=0.5", "model.attention_dropout=0.5")
TEXT = ["task=sst2", "model=roberta_tiny", "clip=flat", "privacy.accountant=rdp", *RATES]
IMAGES = ["task=cifar", "clip=fixed_layer", "privacy.accountant=rdp", "data.train_limit=2"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _read_once():
    """Load tokeniser and sentences once, as they are the same in every world."""
    tokenizer, found = text_classification.find_tokenizer, {}
    with made_up_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            text_classification,
            "find_tokenizer",
            lambda config: found.get(config.model.source) or found.setdefault(config.model.source, tokenizer(config)),
        )
        yield


@pytest.mark.parametrize("asked", [pytest.param(TEXT, marks=pytest.mark.slow), IMAGES], ids=["sst2", "cifar"])
def test_correct_noise_passes_and_too_little_is_detected(asked, monkeypatch):
    """With a hundredth of the noise, 30 plays of each world give a bound above ε = 0.5."""
    setting = make_setting([*asked, "privacy.epsilon=0.5"], plays=30)
    with checked_once(asked[0]):
        right = audit_mode(setting)
    assert right.kept and right.share is not None and 0 < right.share <= 1
    noise_stds = mechanism.noise_stds
    monkeypatch.setattr(mechanism, "noise_stds", lambda *given, **more: 0.01 * noise_stds(*given, **more))
    with checked_once(asked[0]):
        assert not audit_mode(setting).kept


def test_row_names_task_model_dropout_and_plays():
    finding = audit_mode(make_setting([*TEXT, "privacy.epsilon=1"], plays=4, seed=2))
    row = row_of(finding)
    assert (row["model"], row["dropout"], row["design"]) == ("sst2 roberta_tiny", "0.5", "worlds")
    assert (row["canaries"], row["guesses"], row["correct"]) == ("1", "8", "")
    assert "4 of each world" in describe(finding) and "None" not in describe(finding)


def test_mean_gradient_of_an_example_is_within_the_threshold():
    setting = make_setting([*TEXT, "privacy.epsilon=1", "data.train_limit=64"], plays=2)
    trainer = real.trainer_of(setting, 0)
    threshold = float(trainer.private.thresholds.clip_thresholds[0])
    assert 0 < real._mean_gradient(trainer, 0).norm() <= threshold * (1 + 1e-6)
