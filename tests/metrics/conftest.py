"""Real texts with several references each."""

import csv
import os
from collections import defaultdict
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def e2e_dev() -> tuple[list[str], list[list[str]]]:
    """E2E's development set: the first reference of each meaning representation, and its others (1 to 42)."""
    if "GROUPWISE_DATA" not in os.environ:
        pytest.skip("GROUPWISE_DATA (a folder with e2e/devset.csv) not set")
    groups = defaultdict(list)
    with (Path(os.environ["GROUPWISE_DATA"]) / "e2e" / "devset.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[row["mr"]].append(row["ref"])
    texts = [group for group in groups.values() if len(group) > 1]
    return [group[0] for group in texts], [group[1:] for group in texts]
