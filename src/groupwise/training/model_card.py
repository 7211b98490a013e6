"""Writes the privacy guarantee of a trained model into its model card, a README.md for the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.atomic import write_text

TAGS = ("differential-privacy", "dp-sgd", "groupwise")
SETTINGS = ("task", "model.name", "clip.name", "clip.threshold", "optim.name", "optim.learning_rate", "seed")
"""The settings of a run that its card lists."""


def privacy_section(privacy: Mapping[str, Any]) -> str:
    """The section of a model card on privacy, in Markdown.

    Args:
        privacy: the fields of a `PrivacyPlan`, and ``private``, whether its ε is a guarantee. Optional:
            ``neighbours_differ_by``, a phrase, and ``total``, the ε and δ with the runs of the starting weights.
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
        "Trained with differential privacy: the weights are (ε, δ)-DP. Not covered: the choice of settings or "
        "checkpoints by their results, and earlier trainings of the model."
        if privacy["private"]
        else "**This model has no guarantee of differential privacy.**"
    )
    table = "\n".join(
        f"| {name} | {f'{value:.6g}' if isinstance(value, float) else value} |" for name, value in rows.items()
    )
    return f"## Privacy\n\n{claim}\n\n| | |\n|---|---|\n{table}\n"


def write_model_card(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write README.md beside an exported model, with the privacy, settings and metrics of its ``provenance`` only."""
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
