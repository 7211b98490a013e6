"""Runs the examples of private training, a seed in the noise key's place."""

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
    """Runs an example with arguments, which has at most so many lines; the lines that it prints."""

    def printed(name: str, *arguments: str, most: int = 59) -> list[str]:
        assert len((EXAMPLES / name).read_text().splitlines()) <= most
        monkeypatch.setattr(NoiseSource, "fresh", lambda *_: NoiseSource.from_seed(0))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return printed


@pytest.fixture
def numbers(run) -> Callable[..., list[float]]:
    """The numbers of the last line that it prints."""
    return lambda *given, **options: [float(each) for each in re.findall(r"[\d.]+", run(*given, **options)[-1])]
