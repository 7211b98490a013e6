"""Private steps on the emulated GPU: forward, backward, release and update, in every mode, layout and precision."""

from typing import Any

import pytest

WAITS = {"clipping/factors.py:Counts._on_host"}
"""Where a step waits for the device: once, for the counts of all groups, when the batch is over."""


def check(rows: dict[tuple[str, ...], dict[str, Any]]) -> None:
    for case, row in rows.items():
        assert "refused" not in row, (case, row["refused"])
        assert set(row["waits"]) <= WAITS, (case, row["waits"])
        assert all(count == 1 for count in row["waits"].values()), (case, row["waits"])


TINY, FLOATS, TEXT = "tiny=true", ("tiny=true", "precision=float32"), ("tiny=true", "layers=2")
FAST = {
    "images": ["model=wrn16_4_ws", "mode=adaptive_layer", "layout=contiguous", *FLOATS],
    "images in channels_last": ["model=wrn16_4_ws", "mode=flat,fixed_layer", "layout=channels_last", *FLOATS],
    "autocast in channels_last": [
        *("model=wrn16_4_conv", "mode=none,ghost,adaptive_layer"),
        *("precision=bfloat16", "layout=channels_last", TINY),
    ],
    "text, adaptive": ["model=roberta_base", "mode=adaptive_layer", *TEXT],
    "gpt2, adaptive": ["model=gpt2", "mode=adaptive_layer", "precision=float32", *TEXT],
    "text, flat": ["model=gpt2_untied", "mode=flat", "precision=bfloat16", *TEXT],
    "adapters": ["model=lora_gpt2", "mode=flat", "precision=float32", *TEXT],
}
"""Each model, mode, layout and precision once or more; all of them together are slow."""


@pytest.fixture(scope="module")
def fast(emulate_several) -> dict[str, dict[tuple[str, ...], dict[str, Any]]]:
    return dict(zip(FAST, emulate_several(list(FAST.values())), strict=True))


@pytest.mark.parametrize("which", FAST)
def test_every_model_mode_and_layout_runs(fast, which) -> None:
    assert fast[which]
    check(fast[which])


BUDGETS = {
    ("gpt2", "none"): (850, 25.0),
    ("gpt2", "adaptive_layer"): (1470, 27.5),
    ("gpt2", "flat"): (1440, 27.5),
    ("gpt2", "ghost"): (2070, 41.3),
    ("gpt2_untied", "adaptive_layer"): (1480, 27.6),
    ("roberta_base", "adaptive_layer"): (1480, 9.2),
    ("roberta_base", "flat"): (1440, 9.2),
    ("lora_gpt2", "adaptive_layer"): (1500, 31.5),
    ("wrn16_4_ws", "adaptive_layer"): (1370, 44.7),
    ("wrn16_4_ws", "flat"): (1220, 45.0),
    ("wrn16_4_ws", "ghost"): (1550, 58.9),
}
"""Kernels and GB of a forward and backward pass in float32, contiguous, at most."""
SHALLOW = {("gpt2", "adaptive_layer"): 410, ("roberta_base", "adaptive_layer"): 430, ("lora_gpt2", "flat"): 340}
"""Kernels with two transformer blocks, of whatever size."""


RELEASES = {"gpt2": (280, 5.1), "roberta_base": (385, 5.1), "wrn16_4_ws": (120, 0.14)}
"""Kernels and GB of noise, division by B, the optimiser's first step and new thresholds, at most; Philox by plain
operations moves 133 GB."""


def over(rows: dict[tuple[str, ...], dict[str, Any]], budgets: dict[tuple[str, str], tuple[int, float]]) -> list[str]:
    """What takes more than its budget."""
    found = {key: rows[(*key, "contiguous", "float32")] for key in budgets}
    return [
        f"{key}: {found[key]['launches']} kernels, {found[key]['bytes'] / 1e9:.1f} GB for {budget}"
        for key, budget in budgets.items()
        if found[key]["launches"] > budget[0] or found[key]["bytes"] > 1e9 * budget[1]
    ]


def test_two_blocks_keep_to_their_kernels(fast) -> None:
    text = fast["text, adaptive"] | fast["gpt2, adaptive"] | fast["adapters"]
    assert not over(text, {key: (kernels, 1.0) for key, kernels in SHALLOW.items()})


@pytest.mark.slow
def test_every_model_keeps_to_its_kernels_and_bytes(emulate) -> None:
    models, modes = (",".join(sorted({key[i] for key in BUDGETS})) for i in range(2))
    rows = emulate(f"model={models}", f"mode={modes}", "precision=float32", "layout=contiguous")
    assert not over(rows, BUDGETS)
    for model, (kernels, size) in RELEASES.items():
        row = rows[(model, "adaptive_layer", "contiguous", "float32")]
        assert row["rest_launches"] <= kernels and row["rest_bytes"] <= 1e9 * size, (model, row)


HALF_BUDGETS = {
    ("gpt2", "contiguous"): (2300, 32.3),
    ("wrn16_4_ws", "contiguous"): (1540, 39.5),
    ("wrn16_4_ws", "channels_last"): (1500, 38.6),
}
"""The same in bfloat16, adaptive per layer."""


@pytest.mark.slow
def test_bfloat16_moves_less_than_float32_products_would(emulate) -> None:
    rows = emulate("model=gpt2,wrn16_4_ws", "mode=adaptive_layer", "precision=bfloat16")
    for (model, layout), (kernels, size) in HALF_BUDGETS.items():
        row = rows[(model, "adaptive_layer", layout, "bfloat16")]
        assert row["launches"] <= kernels and row["bytes"] <= 1e9 * size, (model, layout, row)


@pytest.mark.slow
def test_every_model_runs_in_every_mode(emulate) -> None:
    check(emulate("tiny=true"))
