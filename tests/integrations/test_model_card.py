"""The card of an exported model states its guarantee in the hub's format, and nothing beyond its provenance."""

from pathlib import Path

import pytest
import yaml

from groupwise.privacy import make_plan
from groupwise.training.model_card import privacy_section, write_model_card
from tests.integrations.tiny import Texts, privacy, trainer

PLAN = make_plan(dataset_size=1000, expected_batch_size=100, steps=20, delta=1e-5, epsilon=3, num_groups=4).to_dict()


def card(folder: Path, **of_privacy) -> tuple[dict, str]:
    """The card's front matter and its text."""
    metrics, config = (
        {"valid/accuracy": 71.25},
        {"task": "sst2", "model.name": "tiny", "clip.name": "flat", "data.x": 1},
    )
    write_model_card(folder, {"privacy": {**PLAN, **of_privacy}, "config": config, "metrics": metrics})
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_card_states_the_guarantee(tmp_path):
    front, text = card(tmp_path, private=True, neighbours_differ_by="one training example")
    assert front == {"tags": ["differential-privacy", "dp-sgd", "groupwise"]}
    assert "| ε | 3 |" in text and "| δ | 1e-05 |" in text and f"σ | {PLAN['noise_multiplier']:.6g} |" in text
    assert "adding or removing one training example" in text and "100, poisson" in text and "no guarantee" not in text
    assert "`clip.name=flat`" in text and "valid/accuracy: 71.25" in text and "data.x" not in text


def test_a_card_without_a_guarantee_claims_none(tmp_path):
    front, text = card(tmp_path, private=False)
    assert front == {"tags": ["groupwise"]} and "no guarantee of differential privacy" in text
    assert "are (ε, δ)-DP" not in text


def test_a_card_includes_the_cost_of_the_starting_weights(tmp_path):
    _, text = card(tmp_path, private=True, total={"epsilon": 5.0, "delta": 2e-5})
    assert "| ε | 5 |" in text and "| δ | 2e-05 |" in text


def test_an_infinite_epsilon_is_written(tmp_path):
    assert "| ε | inf |" in privacy_section({**PLAN, "epsilon": "inf", "noise_multiplier": 0.0, "private": False})


@pytest.mark.parametrize("tags", [None, "mine", ["mine"]])
def test_the_trainers_card_has_a_section_on_privacy(tmp_path, tags):
    run = trainer(tmp_path, budget=privacy(), max_steps=2, save_strategy="no")
    run.train()
    run.create_model_card("en", "mit", tags)
    _, front, text = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert ("mine" in yaml.safe_load(front)["tags"]) == bool(tags)
    assert "differential-privacy" not in front and "no guarantee" in text, "its noise is seeded"
    assert text.count("## Privacy") == 1 and f"| ε | {run.private.plan.epsilon:.6g} |" in text
    assert "train_loss" not in text


def test_the_trainers_table_of_results_contains_epsilon(tmp_path):
    evaluated = {"eval_dataset": Texts(), "eval_strategy": "steps", "eval_steps": 1}
    run = trainer(tmp_path, budget=privacy(), max_steps=2, save_strategy="no", **evaluated)
    run.train()
    run.create_model_card()
    assert "| Validation Loss | Epsilon |" in (tmp_path / "README.md").read_text()
