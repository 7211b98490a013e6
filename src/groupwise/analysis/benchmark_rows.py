"""Reads the rows of the benchmarks, and summarises the rounds of a measurement."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from groupwise.errors import UserError

MACHINE = ("device", "hardware", "threads", "dtype")
"""Columns that must agree for two measurements of one workload to be comparable."""
CELL = ("workload", "batch", "layers", *MACHINE, "method", "memory_format")
"""Columns that identify a measurement; rows that share them are its rounds."""
METHODS = {
    "none": "non-private",
    "none_again": "non-private, repeated",
    "none_matmul": "non-private, same matmul",
    "none_graph": "non-private, CUDA graph",
    "adaptive_layer": "adaptive per layer",
    "adaptive_layer_graph": "adaptive per layer, CUDA graph",
    "fixed_layer": "fixed per layer",
    "block": "per block",
    "flat": "flat, book-keeping",
    "flat_graph": "flat, book-keeping, CUDA graph",
    "ghost": "flat, ghost",
    "opacus_hooks": "Opacus, hooks",
    "opacus_functorch": "Opacus, functorch",
    "opacus_ghost": "Opacus, ghost",
    "opacus_per_layer": "Opacus, per layer",
    "fastdp_layer": "fastDP, per layer",
    "fastdp_flat": "fastDP, flat",
    "private_transformers": "private-transformers, ghost",
    "jax_privacy": "jax_privacy",
}
"""The methods in the order of the tables, and their names there."""


def read_rows(path: Path) -> pd.DataFrame:
    """The rows of a benchmark's CSV; raises `UserError` if there is no such file."""
    if not path.is_file():
        raise UserError(f"There are no measurements in {path}: run the benchmark first (make bench).")
    return pd.read_csv(path)


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each measurement of `throughput.csv`, in the order of tables.

    Columns: those of `CELL`; ``rounds``; medians over the rounds of ``examples_per_second``, ``noise_seconds``,
    ``peak_bytes``, ``ratio``, ``memory_ratio``, ``floor`` and ``whole``, the ratio of steps with noise (``ratio``
    is without noise); ``ratio_least`` and ``ratio_most``; ``status``: "ok", or the status of the first round that
    was not; ``commit``, ``dirty`` and the versions of the last round.
    """
    numbers = ["examples_per_second", "noise_seconds", "peak_bytes", "ratio", "memory_ratio", "floor", "parameters"]
    rows = rows.sort_values("round", kind="stable")
    for name in numbers:  # a column without any number is read as text
        rows[name] = pd.to_numeric(rows[name], errors="coerce")
    seconds = rows["wall_seconds"].where(rows["device"] == "cuda", rows["cpu_seconds"])  # as in `ratio`, and the noise
    rows["whole"] = rows["ratio"] * seconds / (seconds + rows["noise_seconds"])
    groups = rows.groupby(list(CELL), dropna=False, sort=False)
    table = groups[[*numbers, "whole"]].median()
    table["ratio_least"], table["ratio_most"] = groups["ratio"].min(), groups["ratio"].max()
    table["rounds"] = groups["ratio"].count()
    table["status"] = groups["status"].agg(lambda column: next((text for text in column if text != "ok"), "ok"))
    last = ["commit", "dirty", "torch", "opacus", "transformers", "python", "date", "peer"]
    table[last] = groups[last].agg(lambda column: column.iloc[-1])
    table = table.reset_index()
    place = {name: number for number, name in enumerate(in_order(table["method"].unique()))}
    table["place"] = table["method"].map(place)
    order = ["workload", *MACHINE, "layers", "batch", "place", "memory_format"]
    return table.sort_values(order, kind="stable", ignore_index=True).drop(columns="place")


def in_order(methods: Iterable[str]) -> list[str]:
    """Names of methods in the order of the tables; unknown names last."""
    return sorted(methods, key=lambda name: list(METHODS).index(name) if name in METHODS else len(METHODS))


def was_measured(table: pd.DataFrame) -> pd.Series:
    """Whether each row of `cells` is a measurement; other rows say why there is none."""
    return table["status"] == "ok"


def in_words(row: pd.Series) -> str:
    """The machine configuration of a row as text for captions."""
    threads = row["threads"]
    cores = "" if row["device"] == "cuda" else f", {threads:g} thread{'' if threads == 1 else 's'}"
    return f"{row['hardware']}{cores}, {row['dtype']}"
