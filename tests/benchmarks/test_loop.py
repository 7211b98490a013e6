"""The loop's benchmark runs the real session, and counts all of it and nothing else."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from benchmarks import loop, loop_rounds
from benchmarks.loop import LoopOptions
from benchmarks.loop_rounds import BareStep
from groupwise.training.reports import FilesTracker
from tests.checked import checked_once

SMOKE = ["scale=smoke", "train.steps=40", "train.batch_size=8", "privacy.accountant=rdp"]


@pytest.fixture(autouse=True)
def _checked_once():
    with checked_once("loop"):
        yield


def test_rounds_become_rows_and_nothing_of_the_run_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [*SMOKE, "rounds=2", "steps=1", "out=out"]
    assert loop.main(command) == 0
    printed = capsys.readouterr().out
    rows = pd.read_csv("out/loop.csv")
    assert len(printed.splitlines()) == 2 and printed.split()[-8:-5] == ["cifar", "smoke", "adaptive_layer"]
    assert rows["round"].tolist() == [0, 1]
    assert (rows.filter(regex="seconds$|ratio$") > 0).all(axis=None)
    assert rows["ratio"].tolist() == pytest.approx((rows["bare_cpu_seconds"] / rows["loop_cpu_seconds"]).tolist(), 1e-4)
    assert rows["torch"].notna().all() and rows["hardware"].notna().all()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert loop.main(command) == 0
    assert len(pd.read_csv("out/loop.csv")) == 2


def test_the_loop_s_clock_covers_what_happens_between_steps_and_the_bare_one_does_not(tmp_path, monkeypatch):
    """On clocks of their own, which move a little at each look; that of the wall also while a line is logged."""
    logged, now = FilesTracker.log, {"wall": 0.0, "processor": 0.0}

    def pass_by(clock, seconds):
        now[clock] += seconds
        return now[clock]

    def slow(self, step, metrics):
        pass_by("wall", 0.05)
        logged(self, step, metrics)

    clocks = {"perf_counter": lambda: pass_by("wall", 1e-4), "process_time": lambda: pass_by("processor", 1e-4)}
    monkeypatch.setattr("benchmarks.meters.time", SimpleNamespace(**clocks))

    monkeypatch.setattr(FilesTracker, "log", slow)
    _, config = loop.parse(LoopOptions, SMOKE)
    rows = loop_rounds.measure(config, rounds=2, steps=2)
    for row in rows:
        assert row["loop_wall_seconds"] > 0.05
        assert row["loop_wall_seconds"] - row["loop_cpu_seconds"] > 0.04  # a sleep takes no CPU time
        assert row["bare_wall_seconds"] < row["loop_wall_seconds"]


@pytest.mark.parametrize("clip", ["adaptive_layer", "ghost", "none"])
def test_a_bare_step_clips_noises_and_updates_the_very_same_microbatches(clip, monkeypatch):
    seen = []

    class Spy(BareStep):
        def step(self, step, batch):
            trainer = self._trainer
            drawn = trainer.private.sampler.indices(step)
            before = [p.detach().clone() for p in trainer.task.model.parameters()]
            super().step(step, batch)
            moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.task.model.parameters(), strict=True))
            sizes = [examples for examples, _ in batch]
            seen.append((len(drawn), sizes, moved, trainer.private.sums.size))
            if trainer.private.engine is not None:
                assert trainer.private.engine.examples == len(drawn)
            some = drawn[: trainer.private.sums.size]
            assert torch.equal(batch[0][1]["labels"], trainer.task.read(some)["labels"])

    monkeypatch.setattr(loop_rounds, "BareStep", Spy)
    known_draws = "debug.noise_seed=1"  # none of them empty, as one in thousands is
    _, config = loop.parse(LoopOptions, [*SMOKE, f"clip={clip}", "train.microbatch=4", known_draws])
    loop_rounds.measure(config, rounds=1, steps=2)
    assert seen
    for drawn, sizes, moved, microbatch in seen:
        assert sum(sizes) == drawn and microbatch == 4
        assert max(sizes, default=0) <= 4 and moved


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clip=flut"], "did you mean flat"),
        (["train.batchsize=3"], "train.batch_size"),
        (["train.compile=true", *SMOKE], "compile"),
        (["scale=smoke", "rounds=50", "privacy.accountant=rdp"], "train.steps="),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments, words, tmp_path, capsys):
    assert loop.main([*arguments, f"out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
