"""Makes the tables of the benchmarks for results/tables/benchmarks.md, and a summary for docs/benchmarks.md."""

from collections.abc import Callable
from functools import partial

import pandas as pd

from groupwise.analysis.benchmark_rows import MACHINE, METHODS, cells, in_order, in_words, read_rows, was_measured
from groupwise.analysis.results import Folders, Page, number
from groupwise.rows import markdown

WORKLOADS = {
    "wrn16_4_ws": "WRN16-4, weight-standardised, 3 × 32 × 32",
    "wrn16_4_conv": "WRN16-4, plain convolutions, 3 × 32 × 32",
    "roberta_base": "RoBERTa-base shape, 64 tokens",
    "gpt2": "GPT-2 shape, tied, 100 tokens",
    "gpt2_64": "GPT-2 shape, tied, 64 tokens",
    "gpt2_untied": "GPT-2 shape, untied, 100 tokens",
    "llama": "SmolLM2-135M shape",
    "mlp": "MLP 784-1024-1024-10",
    "lora_gpt2": "LoRA, rank 16, on GPT-2",
    "lora_llama": "LoRA, rank 16, on SmolLM2-135M",
}
DEPTHS = {"llama": 30, "lora_llama": 30, "lora_gpt2_xl": 48}
"""Layers of the full models in `benchmarks.workloads`; the other language models have 12."""
KINDS = {
    "adaptive_layer": "adaptive per layer",
    "flat": "flat, book-keeping",
    "ghost": "flat, ghost",
    "opacus": "fastest of Opacus",
    "fastdp": "fastest of fastDP",
    "private_transformers": "private-transformers",
}
"""Prefix of method names -> the name of the fastest of them in the summary."""
PEERS = ("opacus", "fastdp", "private_transformers")


def throughput_tables(rows: pd.DataFrame) -> str:
    """One table per workload and machine configuration, at the batch size with most methods."""
    return "\n\n".join(map(_throughput_table, _workloads(rows)))


def throughput_summary(rows: pd.DataFrame) -> str:
    """One line per workload and machine configuration: speed ratio with noise and memory ratio of each kind of method.

    CUDA graphs are left out, because plain training gains from them too.
    """
    lines = []
    for cell in _workloads(rows[~rows["method"].str.endswith("_graph")]):
        first = cell.iloc[0]
        measured = cell[was_measured(cell)]
        best = {kind: measured[measured["method"].str.startswith(kind)].nlargest(1, "whole") for kind in KINDS}
        name = ", ".join([WORKLOADS.get(first["workload"], first["workload"]), *_depth(first)])
        name += f", batch {first['batch']:g}"
        shown = [one[column] for one in best.values() for column in ("whole", "memory_ratio")]
        ratios = [f"{one.item():.2f}" if len(one) else "–" for one in shown]
        others = max((best[peer]["whole"].item() for peer in PEERS if len(best[peer])), default=None)
        ours = best["adaptive_layer"]["whole"].item() if len(best["adaptive_layer"]) else None
        lines.append([name, in_words(first), *ratios, f"{ours / others:.2f} ×" if ours and others else "–"])
    heads = [head for kind in KINDS.values() for head in (f"{kind}: speed", "memory")]
    return markdown(["workload", "on", *heads, "per layer relative to the fastest peer"], lines)


def _workloads(rows: pd.DataFrame) -> list[pd.DataFrame]:
    order = {name: place for place, name in enumerate(WORKLOADS)}
    groups = cells(rows).groupby(["workload", *MACHINE, "layers"], dropna=False, sort=False)
    chosen = sorted(groups, key=lambda group: order.get(str(group[0][0]), len(order)))
    return [_main_batch(lines) for _, lines in chosen]


def _main_batch(lines: pd.DataFrame) -> pd.DataFrame:
    methods = lines.groupby("batch")["method"].nunique()
    return lines[lines["batch"] == methods[methods == methods.max()].index.max()]


def _throughput_table(lines: pd.DataFrame) -> str:
    first = lines.iloc[0]
    formats = lines["memory_format"].nunique() > 1
    rows = []
    for line, measured in zip(lines.to_dict("records"), was_measured(lines), strict=True):
        name = METHODS.get(line["method"], line["method"])
        name += f" ({line['memory_format']})" if formats else ""
        if not measured:
            rows.append([name, str(line["status"]).replace("|", "\\|"), *["–"] * 5])
            continue
        spread = f"{line['ratio']:.3f} [{line['ratio_least']:.3f}..{line['ratio_most']:.3f}]"
        noise = number(1e3 * line["noise_seconds"], ".1f")
        speed, memory, floor = line["examples_per_second"], line["memory_ratio"], line["floor"]
        numbers = (number(line["whole"], ".3f"), number(memory, ".2f"), number(floor, ".3f"), noise)
        rows.append([name, f"{float(format(speed, '.4g')):,g}", spread, *numbers])
    head = ["method", "examples/s", "speed ratio", "with noise", "memory ratio", "floor", "noise, ms"]
    return f"{_caption(first, lines)}\n\n{markdown(head, rows)}"


def _caption(first: pd.Series, lines: pd.DataFrame) -> str:
    parts = [f"batch {first['batch']:g}", *_depth(first), f"{_span(lines['rounds'])} rounds"]
    versions = [f"{name} {first[name]}" for name in ("torch", "opacus") if isinstance(first[name], str)]
    versions += sorted({name for name in lines["peer"] if isinstance(name, str)})
    commits = sorted({f"`{str(line.commit)[:7]}`{' + changes' if line.dirty else ''}" for line in lines.itertuples()})
    title = WORKLOADS.get(first["workload"], first["workload"])
    return f"**{title}**: {', '.join(parts)}. {in_words(first)}; {', '.join(versions)}; commit {', '.join(commits)}."


def _span(rounds: pd.Series) -> str:
    least, most = rounds[rounds > 0].min(), rounds.max()
    return f"{most}" if least == most else f"{least:g} to {most}"


def _depth(first: pd.Series) -> list[str]:
    """The number of layers that a language model was measured with, if it was not all of them."""
    full = DEPTHS.get(first["workload"], 12)
    return [f"{first['layers']:g} of {full} layers"] if first["layers"] < full else []  # NaN: no option


def side_by_side_table(rows: pd.DataFrame) -> str:
    """One line per method: lines of code, accuracy over seeds, and ε."""
    results = rows[rows["role"] == "result"]
    lines = []
    for method in in_order(results["method"].unique()):
        own = results[results["method"] == method]
        first, accuracy = own.iloc[0], own["accuracy"]
        spread = f"{accuracy.mean():.1f} [{accuracy.min():.1f}..{accuracy.max():.1f}]"
        name = f"{METHODS.get(method, method)}, {first['learning_rate']:g}"
        lines.append([name, str(first["script_lines"]), spread, f"{own['epsilon'].max():.3f}"])
    return markdown(["method, learning rate", "lines of the script", "accuracy, %", "ε"], lines)


def small_models_table(rows: pd.DataFrame, device: str = "cpu") -> str:
    """One line per model: milliseconds per step of each method on a device, and its share of the plain loop's speed."""
    rows = rows[rows["device"] == device]
    methods, lines = in_order(rows["method"].unique()), []
    for (model, dtype), own in rows.groupby(["model", "dtype"], sort=False):
        by_method, first = own.set_index("method"), own.iloc[0]
        lowered = "" if dtype == "float32" else f", {dtype}"
        parts = [f"{model}, {first['parameters']:,} parameters, batch {first['batch']}{lowered}"]
        for method in methods:
            if method not in by_method.index or pd.isna(by_method["milliseconds"][method]):
                parts.append("–" if method not in by_method.index else "refused")
                continue
            found = by_method.loc[method]
            parts.append(f"{found['milliseconds']:.2f}" + (f" ({found['ratio']:.2f})" if method != "none" else ""))
        lines.append(parts)
    return markdown(["model", *(METHODS.get(method, method) for method in methods)], lines)


def page(folders: Folders) -> Page:
    """A page with all tables, and the tables that docs/benchmarks.md shows."""
    measured = folders.measured / "benchmarks"

    def made(name: str, make: Callable[[pd.DataFrame], str]) -> str:
        path = measured / f"{name}.csv"
        return make(read_rows(path)) if path.is_file() else "Not measured yet."

    text = (
        "# Benchmarks",
        "Made by `python -m groupwise.analysis.tables benchmarks`; what is measured is described in "
        "[docs/benchmarks.md](../../docs/benchmarks.md).",
        "## Speed and memory of a step",
        "*Speed ratio* (without noise) and *with noise*: the speed of a method divided by that of non-private training "
        "in the same round, the median over rounds [least..most]. It is not the quotient of two printed medians. "
        "*Floor*: the speed ratio if all counted operations ran at the same rate.",
        made("throughput", throughput_tables),
    )
    parts = {
        "summary": made("throughput", throughput_summary),
        "small_models": made("small_models", small_models_table),
        "small_models_gpu": made("small_models", partial(small_models_table, device="cuda")),
        "side_by_side": made("opacus_side_by_side", side_by_side_table),
    }
    return Page("\n\n".join(text) + "\n", f"what {measured} holds", parts)
