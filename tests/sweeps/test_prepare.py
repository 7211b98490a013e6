"""A sweep runs unfinished cells, as configured at its start, and a failing cell does not stop the others."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from groupwise.config.compose import compose_run, register
from groupwise.config.identity import config_hash
from groupwise.errors import UserError
from groupwise.sweeps.prepare import plan_sweep
from tests.sweeps.conftest import Checkout

CONF = Path(__file__).parents[2] / "conf"
TABLE = ("-m", "+sweep=table", "scale=smoke")
AT_ONCE = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


def conf_with(folder: Path, text: str) -> Path:
    """The project's configuration in `folder`, with one sweep, `table`."""
    shutil.copytree(CONF, folder / "conf", ignore=shutil.ignore_patterns("sweep"))
    (folder / "conf" / "sweep").mkdir()
    (folder / "conf" / "sweep" / "table.yaml").write_text(text)
    register()
    return folder / "conf"


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("ran ")]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A checkout, and the finished process that ran its table."""
    checkout = Checkout(tmp_path_factory.mktemp("swept"))
    return checkout, checkout.sweep()


def test_every_cell_runs_once_at_its_scale(swept):
    checkout, first = swept
    ran = [
        f"ran {clip} {epsilon} {seed} old"
        for seed in (0, 1)  # all cells of one seed first
        for clip in ("flat", "fixed_layer")
        for epsilon in (4.0, 8.0)
    ]
    assert (first.returncode, rows(first.stdout)) == (0, ran)
    counts, *cells = first.stdout.splitlines()[-9:]
    assert counts == "  smoke  8 cells: 8 done"
    assert cells[0] == "  done     clip=flat privacy.epsilon=3 task=cifar seed=0  valid/accuracy 50.00, 60 s"
    assert [cell.split()[-3] for cell in cells] == ["50.00,"] * 4 + ["51.00,"] * 4
    again = checkout.sweep()
    assert (again.returncode, rows(again.stdout)) == (0, [])
    assert again.stdout.splitlines() == cells
    assert "8 of 8 cells are done already" in again.stderr
    assert len(list((checkout.root / "results" / "sweeps").iterdir())) == 1


def test_command_line_changes_cells(checkout):
    assert rows(checkout.sweep("seed=5", "clip=flat,ghost", "+privacy.delta=null").stderr) == []  # refused: +
    done = checkout.sweep("seed=5", "clip=flat", "model.depth=10", "privacy.epsilon=3.0")
    assert rows(done.stdout) == ["ran flat 4.0 5 old"]
    [file] = (checkout.folder / "cells").iterdir()
    assert "depth: 10" in file.read_text()


def test_failing_cell_is_listed_and_repeated_and_stops_no_other(checkout):
    (checkout.root / "fail").touch()
    failing = checkout.sweep("seed=1")  # the failing cells come first
    assert failing.returncode == 1
    assert len(rows(failing.stdout)) == 2
    assert "2 of 4 cells failed:" in failing.stderr
    assert sorted(line.split()[0] for line in failing.stdout.splitlines()[-4:]) == ["done"] * 2 + ["failed"] * 2
    bug, mistake = [line for line in failing.stderr.splitlines() if line.startswith("  clip=flat")]
    assert bug.startswith("  clip=flat privacy.epsilon=3 task=cifar seed=1: RuntimeError (results/sweeps/")
    assert "UserError" in mistake
    files = [checkout.root / line.rpartition("(")[2].rstrip(")") for line in (bug, mistake)]
    assert "Traceback" in files[0].read_text() and "a bug" in files[0].read_text()
    assert files[1].read_text().startswith("UserError: no data: bring some.\n")
    status = checkout.status()
    assert "4 cells: 2 done, 2 failed" in status and "RuntimeError: a bug" in status
    (checkout.root / "fail").unlink()
    again = checkout.sweep("seed=1")
    assert (again.returncode, len(rows(again.stdout))) == (0, 2)
    assert "2 of 4 cells are done already" in again.stderr
    assert "4 cells: 4 done" in checkout.status(str(checkout.folder))


def test_parallel_cells_have_separate_logs(checkout):
    (checkout.root / "fail").touch()
    done = checkout.unforked("run.py", *TABLE, *AT_ONCE, "privacy.epsilon=8")
    assert done.returncode == 2
    assert rows(done.stdout) == []
    assert done.stdout.count("done in ") == 3 and done.stdout.count("failed in ") == 1
    logs = sorted(file.read_text() for file in (checkout.folder / "logs").iterdir())
    assert [log.split()[0] for log in logs] == ["error:", "ran", "ran", "ran"]
    [failed] = (checkout.folder / "failed").iterdir()
    log = checkout.root / failed.read_text().splitlines()[2].removeprefix("log: ")
    assert log.read_text() == "error: no data: bring some.\n"


@pytest.mark.parametrize(("seeds", "count"), [([], 2), (["seed=1"], 1)])
def test_killed_cell_is_listed_and_repeated(seeds, count, checkout):
    cells = ["clip=flat", "privacy.epsilon=8", *seeds]
    (checkout.root / "kill").touch()
    done = checkout.unforked("run.py", *TABLE, *AT_ONCE, *cells)
    assert done.returncode == 1 and "killed, or never started (TerminatedWorkerError)" in done.stderr, done.stderr
    again = checkout.sweep(*cells)
    assert again.returncode == 0 and "ran flat 8.0 1 old" in rows(again.stdout)
    assert checkout.status(str(checkout.folder)).endswith(f"{count} cells: {count} done\n")


def test_cells_run_with_the_configuration_at_the_start(checkout):
    (checkout.root / "wait").touch()
    process = checkout.start("run.py", "-m", "+sweep=table", "scale=smoke", "clip=flat", "privacy.epsilon=8")
    while not (checkout.root / "first").exists():
        assert process.poll() is None
        time.sleep(0.05)
    checkout.write_sweep("grids: [{clip: ghost, seed: 7}]\nscales: {smoke: {privacy.epsilon: 5}}")
    (checkout.root / "wait").unlink()
    code, out, err = process.finish()
    assert (code, rows(out)) == (0, ["ran flat 8.0 0 old", "ran flat 8.0 1 old"]), err


def test_sweep_folder_lists_its_cells(swept):
    checkout, _ = swept
    listed = json.loads((checkout.folder / "cells.json").read_text())
    assert (listed["sweep"], listed["scale"]) == ("table", "smoke")
    cells = listed["cells"]
    names = [f"clip=flat privacy.epsilon={epsilon} task=cifar seed=0" for epsilon in (3, 8)]
    assert [cell["name"] for cell in cells][:2] == names and len(cells) == 8
    assert cells[0]["overrides"][:2] == ["scale=smoke", "task=cifar"]
    for cell in cells:
        row = json.loads((checkout.root / cell["run"] / "result.json").read_text())
        assert row["group"] == "table"  # the group of its runs in wandb
        assert (checkout.folder / "cells" / f"{cell['hash'][:12]}.yaml").is_file()
    assert checkout.folder.name.endswith("-table")


@pytest.mark.parametrize(
    ("sweep", "arguments", "words"),
    [
        ("[{clip: flat, train.epochs: [1, 2]}]", "scale=mini", "no scale=mini"),
        ("[{clip: flat}]", "train.batch_size=0", "in the cell clip=flat seed=0: train.batch_size=0"),
        ("[{clip: null}]", "", "in the cell clip=null seed=0: "),
        ("[]", "", "the sweep table has no grids"),
    ],
)
def test_every_cell_is_checked_before_the_first_runs(tmp_path, sweep, arguments, words):
    conf = conf_with(tmp_path, f"grids: {sweep}\nscales: {{smoke: {{}}}}\n")
    scale = [] if "scale=" in arguments else ["scale=smoke"]
    with pytest.raises(UserError, match=re.escape(words)):
        plan_sweep(["+sweep=table", *scale, *arguments.split()], conf)


def test_sweep_may_set_keys_that_some_modes_ignore(tmp_path):
    conf = conf_with(tmp_path, "grids: [{clip: flat, clip.target_quantile: 0.3}]\nscales: {smoke: {}}\n")
    [cell] = plan_sweep(["+sweep=table", "scale=smoke"], conf).cells
    assert (cell.config.clip.policy, cell.config.clip.target_quantile) == ("fixed", 0.3)


def test_several_values_of_a_key_replace_that_of_the_scale(tmp_path):
    scale = "{train.microbatch: 128, task: {cifar: {train.threads: 1}}}"
    conf = conf_with(tmp_path, f"grids: [{{clip: flat, task: cifar}}]\nscales: {{smoke: {scale}}}\n")
    given = ["+sweep=table", "scale=smoke", "train.microbatch=32,64", "train.threads=2,3"]
    cells = plan_sweep(given, conf).cells
    settings = [(cell.config.train.microbatch, cell.config.train.threads) for cell in cells]
    assert settings == [(32, 2), (32, 3), (64, 2), (64, 3)]
    assert cells[1].name == "clip=flat task=cifar train.microbatch=32 train.threads=3 seed=0"


def test_cells_cannot_export_to_one_folder():
    register()
    given = ["task=e2e", "scale=smoke", "seed=0,1"]
    with pytest.raises(UserError, match=r"export=m names one folder for several cells"):
        plan_sweep([*given, "export=m"], CONF)
    assert len(plan_sweep([*given, "export=m/${seed}"], CONF).cells) == 2


def test_cells_with_given_weights_compose():
    register()
    given = plan_sweep(["+sweep=samsum", "model=opt_175b", "model.source=weights"], CONF).cells
    assert {(cell.config.pipeline.stages, cell.config.model.frozen_dtype) for cell in given} == {
        (16, "bfloat16"),
        (1, "bfloat16"),  # in context
    }
    shown = [cell.config.eval.prompt_set for cell in given if cell.config.eval.shots == 4]
    assert shown == [0, 1, 2]  # a table's number is the mean over the seeds


def test_cells_compose_as_hydra_alone_does():
    arguments = ["task=sst2,e2e", "clip=flat,adaptive_layer", "optim.learning_rate=1,2", "+model.shape={n_layer:2}"]
    register()
    cells = plan_sweep([*arguments, "scale=smoke"], CONF).cells
    assert len(cells) == 8
    for cell in cells[::3]:
        assert config_hash(compose_run(list(cell.overrides), CONF)) == cell.hash


def test_command_line_alone_defines_a_sweep(checkout):
    done = checkout.command("run.py", "-m", "clip=flat,ghost", "seed=0,1", "scale=smoke")
    assert (done.returncode, len(rows(done.stdout))) == (0, 4)
    cells = json.loads((checkout.folder / "cells.json").read_text())["cells"]
    assert [cell["name"] for cell in cells][:2] == ["clip=flat seed=0", "clip=flat seed=1"]
    assert Path(checkout.folder).name.endswith("-cells")


def test_experiment_file_may_choose_the_launcher(checkout):
    (checkout.root / "my" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /hydra/launcher: joblib\nclip: {threshold: 3}\n"
    (checkout.root / "my" / "experiment" / "mine.yaml").write_text(text)
    words = (
        "clip=flat,ghost",
        "+experiment=mine",
        "--config-dir",
        "my",
        "scale=smoke",
        "-m",
        "hydra.launcher.n_jobs=2",
    )
    done = checkout.unforked("run.py", *words)
    assert (done.returncode, done.stdout.count("done in ")) == (0, 2), done.stderr
    assert all("threshold: 3" in file.read_text() for file in (checkout.folder / "cells").iterdir())
