"""Private steps on the emulated GPU: forward, backward, release and update, in every mode, layout and precision."""

from __future__ import annotations

from typing import Any

import pytest

WAITS = {"clipping/engine.py:ClippingEngine.counts"}
"""Where a step waits for the device: once, for the counts of all groups, when the batch is over."""


def check(rows: dict[tuple[str, ...], dict[str, Any]]) -> None:
    for case, row in rows.items():
        assert "refused" not in row, (case, row["refused"])
        assert set(row["waits"]) <= WAITS, (case, row["waits"])
        assert all(count == 1 for count in row["waits"].values()), (case, row["waits"])


def test_every_mode_runs_on_images(emulate) -> None:
    check(emulate("model=wrn16_4_ws", "precision=float32", "tiny=true"))


def test_autocast_runs_on_images_in_channels_last(emulate) -> None:
    modes = "mode=none,ghost,adaptive_layer"
    check(emulate("model=wrn16_4_conv", modes, "precision=bfloat16", "layout=channels_last", "tiny=true"))


def test_adaptive_layers_run_on_text(emulate) -> None:
    check(emulate("model=roberta_base,gpt2,gpt2_untied,lora_gpt2", "mode=adaptive_layer,flat", "tiny=true"))


@pytest.mark.slow
def test_every_model_runs_in_every_mode(emulate) -> None:
    check(emulate("tiny=true"))
