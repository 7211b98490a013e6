"""A worker process from outside: answers, deaths, time limits."""

from benchmarks.job import Job
from benchmarks.process import Process


def test_a_process_answers_until_it_is_killed_and_then_says_so() -> None:
    with Process(Job("mlp", "none", tiny=True), limit=60) as process:
        assert process.ask(do="round", steps=1)["cpu_seconds"] > 0
        assert process.ask(do="round", steps=1)["cpu_seconds"] > 0
        process.process.kill()
        gone = {"refused": "killed by the system, probably out of memory"}
        assert process.ask(do="round", steps=1) == gone
        assert process.ask(do="round", steps=1) == gone


def test_a_process_that_ends_by_itself_leaves_its_exit_code() -> None:
    with Process(Job("mlp", "none", threads=-1), limit=60) as process:
        words = process.ask(do="measure")["refused"]
    assert "exit code 1" in words


def test_a_time_limit_ends_it() -> None:
    with Process(Job("mlp", "none", tiny=True), limit=0.01) as process:
        assert process.ask(do="measure") == {"refused": "no answer within 0.01 s"}
        assert process.process.exitcode is not None
