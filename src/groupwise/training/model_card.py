"""Writes the privacy of a trained model into its card, a README.md as the Hugging Face Hub reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.atomic import write_text

TAGS = ("differential-privacy", "dp-sgd", "groupwise")
SETTINGS = ("task", "model.name", "clip.name", "clip.threshold", "optim.name", "optim.learning_rate", "seed")
"""Of a run's configuration: what a reader of the card wants to know."""


def privacy_section(privacy: Mapping[str, Any]) -> str:
    """What is promised, in Markdown.

    Args:
        privacy: fields of a `PrivacyPlan`; ``private``, whether its ε is a guarantee; ``neighbours_differ_by`` in
            words; and, where the first weights have cost before, ``total`` with their ε and δ together.
    """
    spent = privacy.get("total", privacy)
    rows = {
        "ε": spent["epsilon"],
        "δ": spent["delta"],
        "noise multiplier σ": privacy["noise_multiplier"],
        "adjacency": f"adding or removing {privacy.get('neighbours_differ_by', 'one training example')}",
        "training examples": privacy["dataset_size"],
        "expected batch, sampling": f"{privacy['expected_batch_size']:g}, {privacy['sampling']}",
        "steps": privacy["steps"],
        "clipping groups": privacy["num_groups"],
        "accountant": privacy["accountant"],
    }
    claim = (
        "Trained with differential privacy: the weights are (ε, δ)-DP. Not covered: choosing settings or checkpoints "
        "by results, and data that the model learned from elsewhere."
        if privacy["private"]
        else "**This model has no guarantee of differential privacy.**"
    )
    table = "\n".join(
        f"| {name} | {f'{value:.6g}' if isinstance(value, float) else value} |" for name, value in rows.items()
    )
    return f"## Privacy\n\n{claim}\n\n| | |\n|---|---|\n{table}\n"


def write_model_card(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write README.md beside an exported model: privacy, settings, metrics; of a folder's provenance, and no more."""
    config, metrics = provenance.get("config", {}), provenance.get("metrics", {})
    tags = TAGS if provenance["privacy"]["private"] else TAGS[2:]
    parts = [
        "\n".join(["---", "tags:", *(f"- {tag}" for tag in tags), "---"]),
        f"# {config.get('task', 'model')}, {config.get('model.name', '')}".rstrip(", "),
        privacy_section(provenance["privacy"]),
        "## Settings\n\n" + "\n".join(f"- `{key}={config[key]}`" for key in SETTINGS if key in config),
        "## Results\n\n" + "\n".join(f"- {name}: {value:.4g}" for name, value in metrics.items()),
        "Made by groupwise; `provenance.json` has the whole configuration.\n",
    ]
    write_text(folder / "README.md", "\n\n".join(parts))
