"""Synthetic benchmark rows with round numbers."""

import pandas as pd
import pytest

PROVENANCE = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "torch": "2.13.0",
    "opacus": "1.6.0",
    "transformers": "5.23.0",
    "python": "3.11.7",
    "date": "2026-01-02",
    "peer": None,
}
SPEED = {"none": 100.0, "none_again": 99.0, "adaptive_layer": 96.0, "ghost": 60.0, "flat": 88.0, "opacus_hooks": 40.0}
MEMORY = {"none": 1.0, "none_again": 1.0, "adaptive_layer": 1.01, "ghost": 1.05, "flat": 1.5, "opacus_hooks": 4.0}
GIB = 2**30


def throughput_row(method: str, round_: int, **given: object) -> dict[str, object]:
    """A row whose memory at batch b is b/2 GiB times the method's factor; round r is r % faster, except for `none`."""
    batch = int(given.get("batch", 4))  # type: ignore[call-overload]
    speed = SPEED[method] * (1.0 if method == "none" else 1.0 + 0.01 * round_)
    row = {
        "workload": "gpt2",
        "method": method,
        "memory_format": "contiguous",
        "batch": batch,
        "layers": 4,
        "parameters": 1000,
        "device": "cpu",
        "hardware": "Made-up CPU",
        "threads": 1,
        "dtype": "float32",
        "round": round_,
        "steps": 3,
        "cpu_seconds": batch / speed,
        "wall_seconds": batch / speed,
        "examples_per_second": speed,
        "noise_seconds": 0.0 if method == "none" else 0.012,
        "peak_bytes": int(batch / 2 * MEMORY[method] * GIB),
        "flops": 10**9,
        "ratio": speed / 100.0,
        "memory_ratio": MEMORY[method],
        "floor": 1.0 if method == "none" else 0.99,
        "status": "ok",
    }
    return row | PROVENANCE | given


@pytest.fixture
def throughput() -> pd.DataFrame:
    """GPT-2 at batches 1 to 8 on one thread, and on two threads at twice the speed; Opacus ghost refuses."""
    at = [(b, m, r) for b in (1, 2, 4, 8) for m in SPEED for r in range(3)]
    rows = [throughput_row(m, r, batch=b) for b, m, r in at]
    rows += [throughput_row(m, r, batch=b, threads=2, examples_per_second=2 * SPEED[m]) for b, m, r in at if b < 8]
    refused = {"method": "opacus_ghost", "status": "refused: tied weights | no"}
    numbers = ("cpu_seconds", "wall_seconds", "examples_per_second", "noise_seconds", "peak_bytes", "flops", "ratio")
    rows.append(throughput_row("none", 0) | dict.fromkeys((*numbers, "memory_ratio", "floor")) | refused)
    return pd.DataFrame(rows)


@pytest.fixture
def opacus_comparison() -> pd.DataFrame:
    """A search and three results of two methods; accuracies of 94, 95 and 96."""
    machine = {"device": "cpu", "hardware": "Made-up CPU", "threads": 1, "dtype": "float32"}
    methods = {"adaptive_layer": (0.2, 25), "opacus_hooks": (0.4, 40)}
    return pd.DataFrame(
        {
            "method": method,
            "role": "search" if seed == 100 else "result",
            "seed": seed,
            "learning_rate": rate,
            "accuracy": 50.0 if seed == 100 else 94.0 + seed,
            "epsilon": 7.99,
            "script_lines": script,
            **machine,
            **PROVENANCE,
        }
        for method, (rate, script) in methods.items()
        for seed in (100, 0, 1, 2)
    )
