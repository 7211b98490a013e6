"""The example on single examples' gradients finds planted flips, on the digits, and draws them."""

import re
import runpy
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "influential_examples.py"


def test_it_finds_planted_flips_better_than_chance_by_a_wide_margin(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GROUPWISE_DATA", str(tmp_path))  # no CIFAR-10 there
    monkeypatch.setattr(
        sys, "argv", [FILE.name, "--examples", "900", "--epochs", "4", "--out", str(tmp_path / "x.png")]
    )
    runpy.run_path(str(FILE), run_name="__main__")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("720 examples, 14 of them mislabelled")
    norms, influence, chance = map(float, re.findall(r"[\d.]+$|[\d.]+(?=,)", last))
    assert chance == pytest.approx(0.02, abs=0.002)
    assert norms > 0.5 and influence > 0.25
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
