"""A worker process: its answers, its end, and its time limit."""

from benchmarks.job import Job
from benchmarks.process import Process


def test_killed_process_answers_with_a_refusal() -> None:
    with Process(Job("mlp", "none", tiny=True), limit=60) as process:
        assert process.ask(do="round", steps=1)["cpu_seconds"] > 0
        assert process.ask(do="round", steps=1)["cpu_seconds"] > 0
        process.process.kill()
        gone = {"refused": "killed by the system, probably out of memory"}
        assert process.ask(do="round", steps=1) == gone
        assert process.ask(do="round", steps=1) == gone


def test_failed_process_answers_with_its_exit_code() -> None:
    with Process(Job("mlp", "none", threads=-1), limit=60) as process:
        words = process.ask(do="measure")["refused"]
    assert "exit code 1" in words


def test_time_limit_ends_the_process() -> None:
    with Process(Job("mlp", "none", tiny=True), limit=0.01) as process:
        assert process.ask(do="measure") == {"refused": "no answer within 0.01 s"}
        assert process.process.exitcode is not None
