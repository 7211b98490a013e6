"""Only finished runs of cells of the sweep become rows; runs that contradict their configuration are refused."""

import csv
import json
import shutil
from pathlib import Path

import pytest

import groupwise
from groupwise.config.identity import flat_config
from groupwise.errors import UserError
from groupwise.sweeps.collect import collect, main
from groupwise.sweeps.prepare import PlannedCell, table_cells
from tests.sweeps.test_prepare import conf_with

SWEEP = """# A table.
grids: [{clip: [flat, ghost], seed: [0, 1]}]
scales: {smoke: {train.steps: 2}}
"""


@pytest.fixture(scope="module")
def conf(tmp_path_factory) -> Path:
    return conf_with(tmp_path_factory.mktemp("checkout"), SWEEP)


@pytest.fixture(scope="module")
def cells(conf) -> list[PlannedCell]:
    return table_cells("table", "smoke", conf)


@pytest.fixture
def runs(tmp_path, cells) -> Path:
    """Finished runs of all cells, beside an empty folder for tables."""
    for number, cell in enumerate(cells):
        folder = tmp_path / "runs" / cell.hash[:12]
        folder.mkdir(parents=True)
        row = {"hash": cell.hash, **flat_config(cell.config), "valid/accuracy": 50.0 + number / 3, "git.dirty": False}
        (folder / "result.json").write_text(json.dumps(row))
        (folder / "DONE").touch()
    (tmp_path / "out").mkdir()
    return tmp_path / "runs"


def gather(conf, runs) -> list[str]:
    return collect("table", "smoke", runs, runs.with_name("out"), conf)


def read(runs, kind="") -> list[dict[str, str]]:
    with open(runs.with_name("out") / f"table_smoke{kind}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_each_cell_and_seed_has_a_row_with_its_configuration(conf, cells, runs):
    assert gather(conf, runs)[0].endswith("table_smoke.csv: 4 of 4 cells")
    rows = read(runs)
    assert list(rows[0])[:6] == ["sweep", "cell", "seed", "scale", "task", "model.name"]
    assert [(row["cell"], row["seed"]) for row in rows] == [("clip=flat", s) for s in "01"] + [
        ("clip=ghost", s) for s in "01"
    ]
    assert {row["sweep"] for row in rows} == {"table"} and {row["scale"] for row in rows} == {"smoke"}
    assert rows[1]["valid/accuracy"] == repr(50 + 2 / 3)  # all digits
    assert (rows[0]["train.steps"], rows[0]["hash"]) == ("2", cells[0].hash)
    assert not [key for key in rows[0] if key.startswith("paths.")]


def test_run_without_done_is_named_as_missing(conf, cells, runs):
    (runs / cells[3].hash[:12] / "DONE").unlink()
    printed = gather(conf, runs)
    assert printed[0].endswith("3 of 4 cells")
    assert printed[1:] == ["  missing: clip=ghost seed=1"]
    assert len(read(runs)) == 3


def test_rows_of_another_machine_are_kept_byte_for_byte(conf, cells, runs):
    gather(conf, runs)
    text = (runs.with_name("out") / "table_smoke.csv").read_bytes()
    for cell in cells[:3]:
        shutil.rmtree(runs / cell.hash[:12])
    assert gather(conf, runs)[0].endswith("4 of 4 cells")
    assert (runs.with_name("out") / "table_smoke.csv").read_bytes() == text


def test_cell_takes_the_row_of_another_sweep(conf, cells, runs):
    gather(conf, runs)
    own = runs.with_name("out") / "table_smoke.csv"
    own.rename(own.with_name("other_smoke.csv"))
    (runs / cells[0].hash[:12] / "DONE").unlink()
    assert gather(conf, runs) == [f"{own}: 4 of 4 cells"]
    assert own.read_text() == own.with_name("other_smoke.csv").read_text()


def test_curves_have_the_evaluations_of_runs_with_eval_curve(conf, runs, tmp_path):
    other = conf_with(tmp_path, SWEEP.replace("clip: [flat, ghost]", "clip: flat, eval.curve: true"))
    lines = [
        {"step": 1, "nonprivate/loss": 2.0},
        {"step": 2, "nonprivate/loss": 1.0, "seconds": 1.5, "valid/accuracy": 50.0},
        {"step": 4, "seconds": 3.25, "valid/accuracy": 60.0, "test/nll": 2.0},
    ]
    for cell in table_cells("table", "smoke", other):
        folder = runs / cell.hash[:12]
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps({"hash": cell.hash, **flat_config(cell.config)}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "DONE").touch()
    for _ in range(2):  # the second time from the table alone
        gather(other, runs)
        rows = read(runs, "_curves")
        assert list(rows[0])[:7] == ["sweep", "cell", "seed", "scale", "hash", "step", "seconds"]
        points = [(row["seed"], row["step"], row["seconds"], row["valid/accuracy"], row["test/nll"]) for row in rows]
        assert points == [(s, *rest) for s in "01" for rest in (("2", "1.5", "50.0", ""), ("4", "3.25", "60.0", "2.0"))]
        shutil.rmtree(runs)
        runs.mkdir()


def test_texts_are_those_of_evenly_spaced_inputs(conf, cells, runs):
    folder = runs / cells[1].hash[:12]
    lines = [{"source": f"in {i}", "output": f"out\u2028\r{i}", "references": [f"ref {i}", "other"]} for i in range(10)]
    (folder / "outputs-test.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    for _ in range(2):  # the second time from the table alone
        gather(conf, runs)
        rows = read(runs, "_texts")
        assert [(row["cell"], row["seed"], row["input"]) for row in rows] == [("clip=ghost", "0", i) for i in "036"]
        assert [(row["source"], row["reference"], row["output"]) for row in rows] == [
            (f"in {i}", f"ref {i}", f"out\u2028\r{i}") for i in (0, 3, 6)
        ]
        shutil.rmtree(folder, ignore_errors=True)


def test_rows_of_removed_cells_are_dropped_and_named(conf, cells, runs, tmp_path):
    gather(conf, runs)
    other = conf_with(tmp_path, SWEEP.replace("[flat, ghost]", "flat"))
    printed = gather(other, runs)
    assert printed[0].endswith("2 of 2 cells")
    assert [line.split(",")[0] for line in printed[1:]] == [f"  dropped: clip=ghost seed={seed}" for seed in (0, 1)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("not json", "cannot be read"),
        ("[]", "has no hash"),
        ({"scale": None}, "has no scale"),
        ({"clip.threshold": None}, "has no clip.threshold"),
        ({"hash": "0" * 64}, "says hash=000000000000"),
        ({"scale": "mini"}, "says scale=mini, but the configuration of its hash has smoke"),
        ({"train.steps": 300}, "says train.steps=300"),
    ],
)
def test_inconsistent_result_is_refused_and_nothing_is_written(conf, cells, runs, change, words):
    path = runs / cells[1].hash[:12] / "result.json"
    if isinstance(change, dict):
        row = {key: value for key, value in json.loads(path.read_text()).items() if change.get(key, "") is not None}
        change = json.dumps(row | {key: value for key, value in change.items() if value is not None})
    path.write_text(change)
    with pytest.raises(UserError, match=words):
        gather(conf, runs)
    assert list(runs.with_name("out").iterdir()) == []


def test_sweep_file_outside_of_conf_is_collected(conf, cells, runs, tmp_path):
    (tmp_path / "my" / "sweep").mkdir(parents=True)
    shutil.copy(conf / "sweep" / "table.yaml", tmp_path / "my" / "sweep" / "own.yaml")
    out = runs.with_name("out")
    printed = collect(str(tmp_path / "my" / "sweep" / "own.yaml"), "smoke", runs, out, conf)
    assert printed == [f"{out / 'own_smoke.csv'}: 4 of 4 cells"]
    (tmp_path / "my" / "sweep" / "own.yaml").rename(tmp_path / "my" / "sweep" / "table.yaml")
    with pytest.raises(UserError, match="table is also the name of a sweep of the package: give the file another name"):
        collect(str(tmp_path / "my" / "sweep" / "table.yaml"), "smoke", runs, out, conf)
    assert [path.name for path in out.iterdir()] == ["own_smoke.csv"]


def test_finished_runs_are_a_data_frame(cells, runs):
    (runs / cells[3].hash[:12] / "DONE").unlink()
    frame = groupwise.load_runs(runs)
    assert set(frame["hash"]) == {cell.hash for cell in cells[:3]}
    assert set(frame["folder"]) == {str(runs / cell.hash[:12]) for cell in cells[:3]}
    with pytest.raises(UserError, match="none has no finished run"):
        groupwise.load_runs(runs / "none")


def test_unreadable_table_is_not_overwritten(conf, runs):
    out = runs.with_name("out")
    (out / "table_smoke.csv").write_text("cell,seed\nclip=flat\n")
    with pytest.raises(UserError, match="more or fewer values"):
        gather(conf, runs)
    assert (out / "table_smoke.csv").read_text() == "cell,seed\nclip=flat\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["cifar", "seed=1"], ["scale=mini"], ["table", "scale=huge"]])
def test_wrong_arguments_give_one_sentence(tmp_path, capsys, arguments):
    assert main([*arguments, "--runs", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
