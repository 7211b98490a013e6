"""Runs the examples of private training, with a seed in place of the secret noise key."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.privacy import NoiseSource

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., list[str]]:
    """A function that runs an example with arguments, checks its length, and returns the printed lines."""

    def printed(name: str, *arguments: str, most: int = 59) -> list[str]:
        assert len((EXAMPLES / name).read_text().splitlines()) <= most
        monkeypatch.setattr(NoiseSource, "fresh", lambda *_: NoiseSource.from_seed(0))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return printed


@pytest.fixture
def numbers(run) -> Callable[..., list[float]]:
    """A function that runs an example and returns the numbers in its last printed line."""
    return lambda *given, **options: [float(each) for each in re.findall(r"[\d.]+", run(*given, **options)[-1])]
