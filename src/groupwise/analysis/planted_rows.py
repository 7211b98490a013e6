"""Plants flattering changes in copies of the rows, and records whether they are caught:

    python -m groupwise.analysis.planted_rows

writes results/tables/planted_rows.md. A change is caught if `make tables` refuses it in a sentence, or if it yields no
agreement and the page says why. A number that was merely altered can only be caught by `make reproduce`.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from groupwise.analysis.claims import CLAIMS, Claim
from groupwise.analysis.coverage import refuse_unread
from groupwise.analysis.findings import AGREEMENT, verdicts
from groupwise.analysis.results import CONSTANT, Folders
from groupwise.atomic import write_text
from groupwise.errors import UserError, command
from groupwise.rows import markdown

SWEEP, ROWS = "adaptivity", "adaptivity_mini.csv"
ABOUT = next(claim for claim in CLAIMS if claim.contrast.sweep == SWEEP and len(claim.contrast.plus) == 2)
"""A claim with a verdict in its favour; most changes are planted in its rows."""
ALONE = "noise_allocation"
"""A sweep that shares no cells with others, so that no other rows reveal a change."""
ALLOCATION = next(claim for claim in CLAIMS if claim.contrast.sweep == ALONE)
PAR = next(claim for claim in CLAIMS if claim.contrast.sweep == "cifar")


@dataclass(frozen=True)
class Plant:
    """A flattering change: what it is in words, how it is made in copied folders, and the claim that it would help."""

    words: str
    make: Callable[[Folders], None]
    claim: Claim = ABOUT


def _edit(folders: Folders, change: Callable[[pd.DataFrame], pd.DataFrame], name: str = ROWS) -> None:
    path = folders.measured / name
    change(pd.read_csv(path, dtype=str, keep_default_na=False)).to_csv(path, index=False)


def _replace(folders: Folders, before: str, after: str) -> None:
    path = folders.sweeps / f"{ALONE}.yaml"
    text = path.read_text(encoding="utf-8")
    if before not in text:
        raise UserError(f"{path} has no {before!r}: update the change that replaces it.")
    path.write_text(text.replace(before, after), encoding="utf-8")


def _drop_a_seed(folders: Folders) -> None:
    _edit(folders, lambda rows: rows[(rows["seed"] != "2") | ~rows["cell"].str.contains("clip=adaptive_flat")])


def _drop_a_seed_everywhere(folders: Folders) -> None:
    _edit(folders, lambda rows: rows[rows["seed"] != "2"], f"{ALONE}_mini.csv")
    _replace(folders, "[0, 1, 2]", "[0, 1]")


def _one_seed(folders: Folders) -> None:
    _edit(folders, lambda rows: rows[rows["seed"] == "0"])


def _pool(folders: Folders) -> None:
    def change(rows: pd.DataFrame) -> pd.DataFrame:
        other = rows["cell"].str.contains("epsilon=3")
        seeds = rows["seed"].astype(int)
        cells = rows["cell"].str.replace("epsilon=3", "epsilon=8")
        return rows.assign(seed=seeds.where(~other, seeds + 3).astype(str), cell=cells)

    _edit(folders, change)


def _copy_a_run(folders: Folders) -> None:
    def change(rows: pd.DataFrame) -> pd.DataFrame:
        first = rows[rows["seed"] == "0"].set_index("cell")["valid/accuracy"]
        return rows.assign(**{"valid/accuracy": rows["cell"].map(first)})

    _edit(folders, change)


def _leave_out_a_budget(folders: Folders) -> None:
    _edit(folders, lambda rows: rows[~rows["cell"].str.contains("epsilon=3")], f"{ALONE}_mini.csv")
    _replace(folders, "  mini:\n", "  mini:\n    privacy.epsilon: {3: null}\n")


def _leave_out_a_file(folders: Folders) -> None:
    (folders.measured / "cifar_mini.csv").unlink()


def _leave_out_a_sweep(folders: Folders) -> None:
    _leave_out_a_file(folders)
    (folders.sweeps / "cifar.yaml").unlink()


def _forget_the_floor(folders: Folders) -> None:
    (folders.measured / CONSTANT).unlink()


def _forget_one_floor(folders: Folders) -> None:
    _edit(folders, lambda rows: rows[rows["task"] != "cifar"], CONSTANT)


PLANTS = (
    Plant("a seed dropped from the rows of one way of clipping", _drop_a_seed),
    Plant("a seed dropped from all rows and from the sweep", _drop_a_seed_everywhere, ALLOCATION),
    Plant("all but one seed dropped", _one_seed),
    Plant("runs at ε = 3 counted as further seeds at ε = 8", _pool),
    Plant("the first seed's numbers given to all seeds", _copy_a_run),
    Plant("one ε left out of the rows and of the scale", _leave_out_a_budget, ALLOCATION),
    Plant("the rows of a sweep that speaks against the claim removed", _leave_out_a_file, PAR),
    Plant("the same, and its sweep", _leave_out_a_sweep, PAR),
    Plant("the scores of one answer for every input removed", _forget_the_floor),
    Plant("the scores of one answer removed for one task", _forget_one_floor),
)


def try_out(plant: Plant, folders: Folders) -> tuple[bool, str]:
    """Whether the change is caught, and the output of the tables' commands, in copies of `folders`."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Folders(folders.paper, Path(scratch) / "measured", Path(scratch) / "sweeps")
        shutil.copytree(folders.measured, copy.measured)
        shutil.copytree(folders.sweeps, copy.sweeps)
        plant.make(copy)
        try:
            refuse_unread(copy)
            found = [verdict for verdict in verdicts(copy) if verdict.claim is plant.claim]
        except UserError as error:
            return True, "refused: " + str(error).replace(f"{scratch}/", "")
    return not any(verdict.word == AGREEMENT for verdict in found), "; ".join(verdict.said for verdict in found)


def page(tried: Sequence[tuple[Plant, bool, str]]) -> str:
    """The record in Markdown."""
    rows = [
        [plant.words, "caught" if caught else "NOT CAUGHT", re.sub(r"\s+", " ", said)] for plant, caught, said in tried
    ]
    parts = (
        "# Flattering changes, planted in copies of the rows",
        "Made by `python -m groupwise.analysis.planted_rows`. Caught: `make tables` refuses the change in a sentence, "
        "or no agreement comes of it and the page says why. A number that was altered in a row is caught by neither: "
        "that takes `make reproduce`.",
        markdown(["what is planted", "", "what is said"], rows),
    )
    return "\n\n".join(parts) + "\n"


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 1 where a change was not caught."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.analysis.planted_rows")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    Folders.add_options(parser)
    given = parser.parse_args(arguments)
    folders = Folders.given(given)
    tried = [(plant, *try_out(plant, folders)) for plant in PLANTS]
    given.out.mkdir(parents=True, exist_ok=True)
    write_text(given.out / "planted_rows.md", page(tried))
    caught = sum(was for _, was, _ in tried)
    print(f"{caught} of {len(tried)} caught; {given.out / 'planted_rows.md'}")
    return 0 if caught == len(tried) else 1


if __name__ == "__main__":
    sys.exit(main())
