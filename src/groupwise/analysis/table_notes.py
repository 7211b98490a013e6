"""Writes the notes under a table: privacy, what was reduced, where we part from the paper, where the rows come from."""

from collections.abc import Iterable, Mapping

import pandas as pd

from groupwise.analysis.measured import read_measured
from groupwise.analysis.paper import Folders
from groupwise.sweeps.cells import PAPER, Sweep, read_sweep, text

SCALES = {
    "paper": "the paper's cell",
    "midi": "real data at half the pixels, the paper's depth at a quarter of its width, ten epochs",
    "mini": "real data, smaller and on a small network, a short training",
    "demo": "embedded or generated data and a small network",
}
ADJACENCY = {"add_remove": "adding or removing one training example"}
SAMPLING = {"poisson": "Poisson samples", "shuffle": "shuffled batches, so ε is as published and no guarantee"}
COMMON = ("Counts are centred", "Poisson or shuffled", "The number of steps")
ERRATA = {
    "fixed_per_layer": ("Table 1 and the ablation table disagree", "Hyperparameters were tuned on the test set"),
    "cifar": ("Hyperparameters were tuned on the test set", "The network's block order"),
    "glue": ("What the language experiments leave open",),
    "sst2_epochs": ("What the language experiments leave open",),
    "table2text": ("What the language experiments leave open",),
    "samsum": ("Per-device noise", "What the language experiments leave open"),
    "noise_allocation": ("What the language experiments leave open",),
    "adaptivity": ("Table 1 and the ablation table disagree", "Hyperparameters were tuned on the test set"),
}


def errata_of(name: str) -> list[str]:
    """The headings in docs/errata.md that bear on a table."""
    return [*COMMON, *ERRATA.get(name, ())]


def notes(name: str, folders: Folders, lines: pd.DataFrame) -> list[str]:
    """Sentences for the foot of a table, given its `table_lines`: on privacy, scales, provenance and what is odd."""
    used = rows_of(name, folders, lines)
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    found = [*_scales(used), *_changes(sweep, used), *_privacy(used), *_provenance(used)]
    flags = lines[lines["flags"] != ""].drop_duplicates(["cell", "flags"])
    found += [f"Flag: {line['row']}, {line['column']}: {line['flags']}." for line in flags.to_dict("records")]
    return found


def rows_of(name: str, folders: Folders, lines: pd.DataFrame) -> pd.DataFrame:
    """The measured rows that the lines of a table were made from."""
    sweep = read_sweep(folders.sweeps / f"{name}.yaml")
    parts = [read_measured(sweep, scale, folders.measured).rows for scale in lines["scale"].unique() if scale]
    if not parts:
        return pd.DataFrame(columns=["scale", "hash"])
    hashes = {text for listed in lines["hashes"] for text in listed.split()}
    rows = pd.concat(parts, ignore_index=True)
    return rows[rows["hash"].str[:12].isin(hashes)].reset_index(drop=True)


def _scales(used: pd.DataFrame) -> list[str]:
    found = [f"scale={scale}: {SCALES[scale]}" for scale in sorted(set(used["scale"]), key=list(SCALES).index)]
    reduced = any(scale != PAPER for scale in used["scale"])
    end = ". Reduced numbers are no reproduction: compare them among themselves only." if reduced else "."
    return ["; ".join(found) + end] if found else ["Nothing was measured yet."]


def _changes(sweep: Sweep, used: pd.DataFrame) -> list[str]:
    """What a scale has in the place of the paper's settings, beyond its sizes (`conf/scales`)."""
    found = []
    for scale in sorted(set(used["scale"])):
        words = []
        for key, change in (sweep.scales.get(scale) or {}).items():
            pairs = change if isinstance(change, Mapping) else {"": change}
            words += [_change(key, text(old) if old != "" else "", new) for old, new in pairs.items()]
        if words:
            found.append(f"At scale={scale}: {'; '.join(words)}.")
    return found


def _change(key: str, old: str, new: object) -> str:
    if new is None:
        return f"{key}={old} left out"
    if isinstance(new, Mapping):
        return f"{key}={old} with {', '.join(f'{name}={text(value)}' for name, value in new.items())}"
    return f"{key}={text(new)}" + (f" for {old}" if old else "")


def _privacy(used: pd.DataFrame) -> list[str]:
    if used.empty or "plan.private" not in used:
        return []
    private = used[used["plan.private"] == "True"]
    found = []
    if len(private):
        delta = _listed(f"{float(text):.3g}" for text in _values(private, "plan.delta"))
        neighbours = _listed(ADJACENCY.get(text, text) for text in _values(private, "plan.adjacency"))
        batches = _listed(SAMPLING.get(text, text) for text in _values(private, "plan.sampling"))
        accountant = _listed(text.upper() for text in _values(private, "plan.accountant"))
        found.append(f"Privacy: δ = {delta}; for {neighbours}; {batches}" + (f"; {accountant}." if accountant else "."))
    if others := len(used) - len(private):
        found.append(f"{others} of {len(used)} runs carry no guarantee (no noise, or no Poisson samples).")
    return found


def _provenance(used: pd.DataFrame) -> list[str]:
    if used.empty:
        return []
    commits = _listed(sorted({text[:7] for text in used["git.sha"] if text})) or "none"
    words = f"{len(used)} runs; commits {commits}"
    for column, label in (("system.device", "on"), ("versions.torch", "torch")):
        if found := _listed(_values(used, column)):
            words += f"; {label} {found}"
    return [words + "."]


def _values(rows: pd.DataFrame, column: str) -> list[str]:
    return sorted({text for text in rows[column] if text}) if column in rows else []


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
