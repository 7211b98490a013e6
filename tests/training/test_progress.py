"""The progress line of a run: when it is written, and what it shows."""

import io
from types import SimpleNamespace

import pytest

from groupwise.training import progress
from groupwise.training.progress import Progress

NOISELESS = SimpleNamespace(noise_multiplier=0.0)
NOISED = SimpleNamespace(noise_multiplier=1.0, progress=lambda step: step * 1.5, epsilon=3)


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().strip().split("\r")


@pytest.mark.parametrize(("start", "steps"), [(0, 100), (990, 1000)], ids=["new", "resumed"])
def test_a_log_file_gets_few_lines_from_the_first_step_of_the_session_to_the_end(start: int, steps: int) -> None:
    stream = io.StringIO()
    with Progress(NOISELESS, start, steps, file=stream) as bar:
        for number in range(start + 1, steps + 1):
            bar.step(number)
    first, last = lines_of(stream)
    assert f"{start}/{steps}" in first and f"{steps}/{steps}" in last


def test_a_line_shows_epsilon_and_the_last_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "ELSEWHERE", 0.0)
    stream = io.StringIO()
    with Progress(NOISED, 0, 2, file=stream) as bar:
        bar.step(1, "valid 61.0 %")
        bar.step(2)
    _, first, *_, last = lines_of(stream)
    assert "1/2" in first and "ε 1.50 of 3" in first
    assert "2/2" in last and "ε 3.00 of 3" in last and last.count("valid 61.0 %") == 1


def test_disabled_progress_writes_nothing_and_computes_no_epsilon() -> None:
    stream = io.StringIO()
    with Progress(SimpleNamespace(noise_multiplier=1.0), 0, 1, file=stream, disable=True) as bar:
        bar.step(1)
    assert not stream.getvalue()
