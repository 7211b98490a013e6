"""What a person sees while a run goes on."""

import io
from types import SimpleNamespace

from groupwise.training.progress import Progress

NOISELESS = SimpleNamespace(noise_multiplier=0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_log_file_there_is_a_line_now_and_then_and_one_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(100, 0, NOISELESS, stream, clock) as progress:
        for step in range(1, 101):
            clock.now += 1
            progress.update(step, examples=32)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        "15/100",
        "30/100",
        "45/100",
        "60/100",
        "75/100",
        "90/100",
        "100/100",
    ]
    assert lines[0].endswith("1:25 left")


def test_a_line_tells_epsilon_throughput_and_the_last_note() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(
        2, 0, SimpleNamespace(noise_multiplier=1.0, progress=lambda step: step * 1.5, epsilon=3), stream, clock
    )
    clock.now += 20
    progress.update(1, examples=640, note="valid 61.0 %")
    clock.now += 20
    progress.update(2, examples=640)
    first, last = stream.getvalue().splitlines()
    assert "ε 1.50 of 3" in first and "ε 3.00 of 3" in last
    assert "32 examples/s" in last
    assert last.count("valid 61.0 %") == 1
    assert progress.examples_per_second == 32


def test_a_resumed_run_reckons_with_the_steps_of_this_process_only() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(1000, 990, NOISELESS, stream, clock)
    clock.now += 20
    progress.update(991, examples=0)
    assert stream.getvalue().endswith("3:00 left\n")


def test_on_a_terminal_the_line_is_renewed() -> None:
    clock, stream = Clock(), Terminal()
    with Progress(3, 0, NOISELESS, stream, clock) as progress:
        clock.now += 1
        for step in (1, 2, 3):
            progress.update(step, examples=1)
    first, last = stream.getvalue().removeprefix("\r").split("\r")
    assert first.startswith("step 1/3  1 examples/s") and last.startswith("step 3/3")
    assert stream.getvalue().endswith("\n")
