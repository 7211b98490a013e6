"""An accounted search is drawn once, goes on after a kill, releases its best run, and leaves nothing of the others."""

import fcntl
import json
import os
import stat
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from groupwise.config.compose import compose_run
from groupwise.config.identity import config_hash, flat_config
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.privacy.tuning import SearchCost, Training, TruncatedNegativeBinomial
from groupwise.sweeps.accounted import Search, Setting
from groupwise.sweeps.secret_runs import draw_settings, run_search
from tests.forks import Command

ROOT = Path(__file__).parents[2]
RATES = (1, 2, 4, 8)


class Trained:
    """Stands for training: writes the record of a run, and remembers under which rates it was asked to."""

    def __init__(self, scores=None, **odd):
        self.scores, self.odd = scores or {}, odd
        self.rates: list[float] = []
        self.die_at: int | None = None

    def __call__(self, config: RunConfig) -> float:
        if len(self.rates) == self.die_at:
            raise KeyboardInterrupt
        rate = config.optim.learning_rate
        print(f"a secret: {rate}", flush=True)
        os.write(2, f"another: {rate}\n".encode())
        digest = config_hash(config)
        folder = Path(config.paths.results) / "runs" / digest[:12]
        folder.mkdir(parents=True)
        plan = {"private": True, "dataset_size": 100, "steps": 50, "delta": 1e-3, "noise_multiplier": 2.0}
        plan = {f"plan.{key}": value for key, value in (plan | {"expected_batch_size": 10} | self.odd).items()}
        score = self.scores.get(rate, rate)
        row = {"hash": digest, **flat_config(config), **plan, "valid/accuracy": score, "nonprivate/train_loss": 0.5}
        (folder / "result.json").write_text(json.dumps(row))
        (folder / "model.pt").write_text(f"{len(self.rates)}: weights at {rate}")
        os.utime(folder / "model.pt", (1, 1))  # long ago
        (folder / "DONE").touch()
        self.rates.append(rate)
        return score


@pytest.fixture
def search(tmp_path) -> Search:
    configs = [compose_run(["scale=smoke", "privacy.noise_multiplier=2"], ROOT / "conf") for _ in RATES]
    for config, rate in zip(configs, RATES, strict=True):
        config.optim.learning_rate = rate
    training = Training(2.0, 0.1, 50)
    settings = tuple(Setting(f"optim.learning_rate={r}", c, training) for r, c in zip(RATES, configs, strict=True))
    count = TruncatedNegativeBinomial.with_mean(1.0, 4.0)
    return Search(tmp_path / "searches" / "table-0", "0", settings, count, SearchCost(1.0, 3.0, 2.0), 100, 1e-3)


@pytest.fixture
def drawn(monkeypatch):
    """Fixes what is drawn: how many runs, and the settings' numbers, again and again."""

    def fix(*settings):
        left = [*settings]
        monkeypatch.setattr(TruncatedNegativeBinomial, "draw", lambda self: len(settings))
        monkeypatch.setattr("secrets.randbelow", lambda most: left.pop(0))

    return fix


def release_of(search):
    return json.loads((search.folder / "released" / "release.json").read_text())


def names(search):
    return sorted(path.relative_to(search.folder).as_posix() for path in search.folder.rglob("*") if path.is_file())


def test_the_best_run_alone_is_left(search, drawn, capfd):
    drawn(1, 3, 0, 3, 2)
    train = Trained()
    lines = run_search(search, train)
    assert train.rates == [2, 8, 1, 8, 4]
    kept = [".lock", "DONE", "released/config.yaml", "released/model.pt", "released/release.json"]
    assert names(search) == kept and not (search.folder / "unreleased").exists()
    assert (search.folder / "released" / "model.pt").read_text() == "1: weights at 8"  # the first of equals
    found = release_of(search)
    assert (found["setting"], found["metrics"]) == ("optim.learning_rate=8", {"valid/accuracy": 8})
    assert found["privacy"]["epsilon"] == search.cost.search
    told = "".join(capfd.readouterr()) + "\n".join(lines)
    assert "a secret" not in told and "another" not in told and lines[0] == "Released: optim.learning_rate=8"
    said = told + "".join(path.read_text() for path in (search.folder / "released").iterdir())
    assert "nonprivate" not in said and str(search.folder / "unreleased" / "1") not in said


def test_no_file_of_a_release_is_as_old_as_its_run(search, drawn):
    drawn(1, 3, 0)
    before = time.time() - 10  # a file system's clock may be a little behind
    run_search(search, Trained())
    assert all(path.stat().st_mtime > before for path in (search.folder / "released").iterdir())


def test_neither_how_many_nor_which_can_be_read_off(search, drawn):
    """Searches with other draws, but the same best run, leave the same files."""
    left = []
    for draws in ((3,), (0, 1, 3, 2, 2, 0)):
        drawn(*draws)
        other = replace(search, folder=search.folder.with_name(f"table-{len(draws)}"))
        told = run_search(other, Trained())
        texts = {name: (other.folder / name).read_text() for name in names(other)}
        texts["released/model.pt"] = texts["released/model.pt"].partition(":")[2]  # which holds Trained's own count
        left.append((told[:-1], texts))
    assert left[0] == left[1]


def test_what_was_killed_goes_on_with_the_same_draw(search, drawn, monkeypatch):
    drawn(1, 2, 0)
    train = Trained()
    train.die_at = 1
    with pytest.raises(KeyboardInterrupt):
        run_search(search, train)
    unreleased = search.folder / "unreleased"
    assert stat.S_IMODE(unreleased.stat().st_mode) == 0o700
    assert stat.S_IMODE((unreleased / "search.json").stat().st_mode) == 0o600
    assert "NOT TO BE RELEASED" in (unreleased / "NOT-TO-BE-RELEASED.txt").read_text()
    assert (unreleased / "0.log").read_text() == "a secret: 2\nanother: 2\n" and not (search.folder / "DONE").exists()
    drawn(3, 3, 3, 3)  # a new draw would be luckier
    train.die_at = None
    run_search(search, train)
    assert train.rates == [2, 4, 1] and release_of(search)["setting"] == "optim.learning_rate=4"


@pytest.mark.parametrize("at", ["before the draw", "before DONE"])
def test_killed_between_two_files_it_goes_on(search, drawn, at, monkeypatch):
    drawn(1, 2, 0)
    train = Trained()
    victim = {"before the draw": "write_atomically", "before DONE": "write_text"}
    real = getattr(__import__("groupwise.sweeps.secret_runs", fromlist=["x"]), victim[at])

    def dies(path, *rest):
        if at != "before DONE" or path.name == "DONE":
            raise KeyboardInterrupt
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(f"groupwise.sweeps.secret_runs.{victim[at]}", dies)
        with pytest.raises(KeyboardInterrupt):
            run_search(search, train)
    drawn(1, 2, 0) if at == "before the draw" else drawn(3, 3, 3)
    run_search(search, train)
    assert train.rates == [2, 4, 1] and release_of(search)["setting"] == "optim.learning_rate=4"


def test_what_is_done_is_shown_and_not_drawn_again(search, drawn):
    drawn(1, 2)
    first = run_search(search, Trained())
    drawn(3, 3)
    again = Trained()
    assert run_search(search, again) == first and again.rates == []


def test_a_draw_that_is_gone_is_not_made_again(search, drawn):
    drawn(1, 2)
    train = Trained()
    train.die_at = 1
    with pytest.raises(KeyboardInterrupt):
        run_search(search, train)
    (search.folder / "unreleased" / "search.json").unlink()
    drawn(3, 3)
    with pytest.raises(UserError, match="is gone, without which the search cannot go on with the same draw"):
        run_search(search, train)


@pytest.mark.parametrize(
    "change",
    [{"examples": 101}, {"key": "1"}, {"delta": 1e-4}, {"count": TruncatedNegativeBinomial(1.0, 0.1)}],
    ids=lambda change: next(iter(change)),
)
def test_another_search_does_not_go_on_with_its_draw(search, drawn, change):
    drawn(1, 2)
    train = Trained()
    train.die_at = 1
    with pytest.raises(KeyboardInterrupt):
        run_search(search, train)
    with pytest.raises(UserError, match="begun with other data, noise or libraries"):
        run_search(replace(search, **change), train)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": "0"}'])
def test_a_draw_that_was_altered_is_refused(search, drawn, text):
    drawn(1, 2)
    train = Trained()
    train.die_at = 0
    with pytest.raises(KeyboardInterrupt):
        run_search(search, train)
    (search.folder / "unreleased" / "search.json").write_text(text)
    with pytest.raises(UserError, match="was changed after the search wrote it: restore it"):
        run_search(search, train)


@pytest.mark.parametrize(
    "odd", [{"private": False}, {"noise_multiplier": 1.0}, {"steps": 51}, {"dataset_size": 99}, {"delta": 1e-2}]
)
def test_a_run_that_is_not_what_was_accounted_for_ends_it(search, drawn, odd):
    drawn(1)
    with pytest.raises(UserError, match="was accounted for: release nothing"):
        run_search(search, Trained(**odd))
    assert not (search.folder / "released").exists()


def test_a_run_that_diverged_is_worst_and_is_no_reason_to_draw_another(search, drawn):
    drawn(3, 0)
    run_search(search, Trained({8: float("nan"), 1: -5.0}))
    assert release_of(search)["setting"] == "optim.learning_rate=1"
    drawn(3, 3)
    other = replace(search, folder=search.folder.with_name("other"))
    run_search(other, Trained({8: float("inf")}))
    assert release_of(other)["setting"] == "optim.learning_rate=8"


def test_two_processes_do_not_draw_at_once(search):
    search.folder.mkdir(parents=True)
    with open(search.folder / ".lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process runs the search"):
            run_search(search, Trained())


def test_settings_are_drawn_evenly():
    """χ² at an error rate of 1e-6 on some 2000 draws; with a tenth more of one setting it rejects."""
    counts = Counter(of for _ in range(500) for of in draw_settings(TruncatedNegativeBinomial(1.0, 0.25), 4))
    assert set(counts) == {0, 1, 2, 3} and stats.chisquare(list(counts.values())).pvalue > 1e-6
    counts[0] += 300
    assert stats.chisquare(list(counts.values())).pvalue < 1e-6


def command(tmp_path, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = Command(str(ROOT / "run.py"), *words, f"paths.results={tmp_path}", cwd=ROOT, environment=environment)
    return process.finish()


def test_a_single_run_is_no_search(tmp_path):
    code, out, err = command(tmp_path, "tuning=accounted", "scale=smoke")
    assert (code, out) == (2, "") and err.startswith("error: tuning=accounted is for sweeps: add -m")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_searches_trains_and_releases(tmp_path):
    words = ["-m", "task=cifar", "scale=smoke", "clip=flat", "optim.learning_rate=1,2,4", "train.steps=2"]
    words += ["privacy.epsilon=3", "privacy.accountant=rdp", "tuning=accounted", "tuning.runs=2"]
    code, out, err = command(tmp_path, *words)
    assert code == 0, err
    assert out.count("epsilon = ") == 4 and "Released: optim.learning_rate=" in out and "Privacy:" not in out
    [folder] = (tmp_path / "searches").iterdir()
    assert {path.name for path in folder.iterdir()} == {".lock", "DONE", "released"}
    assert [path.name for path in tmp_path.iterdir()] == ["searches"]
    privacy = json.loads((folder / "released" / "release.json").read_text())["privacy"]
    assert 2.99 <= privacy["epsilon"] <= 3.0
    assert command(tmp_path, *words)[1].splitlines()[-4:] == out.splitlines()[-4:]
