"""Finds the noise multipliers of all sweeps at the paper's scale, so that they can be carried to another machine.

    python -m scripts.gpu.sweep_noise      a line for each; they stay in the cache folder of groupwise.cache

A σ follows from N, B, T, ε and δ alone. N is the published number of training examples, so no data are read; where a
cell sets a share of the training set aside by the content of the examples, N is not known without them, and the cell is
left out.
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from groupwise.config.schema import RunConfig
from groupwise.privacy import PrivacyPlan
from groupwise.run import plan_run
from groupwise.sweeps.cells import PAPER
from groupwise.sweeps.prepare import table_cells

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "cifar": 50_000,
    "sst2": 67_349,
    "qnli": 104_743,
    "qqp": 363_846,
    "mnli": 392_702,
    "e2e": 42_061,
    "dart": 62_659,
    "samsum": 14_732,
}
"""N of the training sets: sections 4.1, 5.2 and 5.3, appendix A."""
HELD_BY_NUMBER = ("sst2", "qnli", "qqp", "mnli")
"""Tasks whose `data.holdout` is an exact share; that of the others goes by what the examples are."""


def examples(config: RunConfig) -> int | None:
    """N of a run, where it is known without the data."""
    whole = EXAMPLES.get(config.task)
    if whole is None or config.data.train_limit is not None or config.data.train_file is not None:
        return None
    if not config.data.holdout:
        return whole
    return whole - round(config.data.holdout * whole) if config.task in HELD_BY_NUMBER else None


def find_all(root: Path = ROOT) -> Iterator[PrivacyPlan]:
    """The plans of all noisy cells of `root`/sweeps, one for each σ; each σ is in the cache when its plan comes."""
    seen = set()
    for file in sorted((root / "sweeps").glob("*.yaml")):
        if "grids:" not in file.read_text(encoding="utf-8"):
            continue  # of a search that chooses its cells as it goes
        for cell in table_cells(file.stem, PAPER, root / "conf"):
            config, size = cell.config, examples(cell.config)
            train, privacy = config.train, config.privacy
            setting = (
                *(size, train.batch_size, train.sample_rate, train.epochs, train.steps),
                *(privacy.epsilon, privacy.delta, privacy.accountant, config.clip.grouping == "none"),
            )
            if size is None or setting in seen:
                continue
            seen.add(setting)
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                plan = plan_run(config, size, None if config.clip.grouping == "none" else 1)
            if plan.noise_multiplier > 0.0:
                yield plan


def main() -> int:
    """The command line; returns its exit code."""
    for plan in find_all():
        print(
            f"sigma {plan.noise_multiplier:8.4f}  epsilon {plan.epsilon:g} delta {plan.delta:.3g} "
            f"N {plan.dataset_size} B {plan.expected_batch_size:g} T {plan.steps}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
