"""The throughput figure shows the expected rows and is deterministic."""

import pandas as pd
import pytest

from groupwise.analysis.benchmark_rows import cells
from groupwise.analysis.figures import main
from groupwise.analysis.results import Folders
from groupwise.analysis.throughput_figure import draw, panels


def test_both_panels_have_every_batch_and_the_median_ratio(throughput):
    gpu = throughput[throughput["batch"] == 8].assign(device="cuda", hardware="Made-up GPU")
    shown = panels("throughput", cells(pd.concat([throughput, gpu])))
    flat = shown.lines[shown.lines["method"] == "flat"]
    assert flat["batch"].tolist() == [1, 2, 4, 8]
    assert flat["ratio"].tolist() == pytest.approx([0.88 * 1.01] * 4)  # the median of three rounds
    assert "4 layers" in shown.caption and "1 thread" in shown.caption
    assert shown.scale == "reduced" and shown.absent == {}
    figure = draw(shown)
    assert figure.axes[1].get_ylabel() == "throughput relative to\nnon-private, without noise"
    assert "With noise: adaptive per layer 0.45 to 0.85 on the Made-up CPU; " in figure.get_label()
    assert "; adaptive per layer 0.85 to 0.85 on the Made-up GPU; " in figure.get_label()
    assert "Without noise, which is added once per logical batch and takes 0.012 s here." in figure.get_label()


def test_resolution_is_the_deviation_of_a_repeated_baseline(throughput):
    shown = panels("throughput", cells(throughput))
    assert "none_again" not in set(shown.lines["method"])
    figure = draw(shown)
    assert "up to 0.010 from 1" in figure.get_label()  # 0.99, 0.99 * 1.01, 0.99 * 1.02
    once = panels("throughput", cells(throughput[throughput["method"] != "none_again"]))
    assert "itself" not in draw(once).get_label()


def test_refused_method_is_named_with_its_reason(throughput):
    hooks = throughput["method"] == "opacus_hooks"
    refused = throughput.assign(
        examples_per_second=throughput["examples_per_second"].mask(hooks),
        status=throughput["status"].mask(hooks, "refused: no"),
    )
    assert panels("throughput", cells(refused)).absent == {"opacus_hooks": "refused: no"}


def run(tmp_path, rows: pd.DataFrame, *names: str) -> int:
    (tmp_path / "benchmarks").mkdir(exist_ok=True)
    rows.to_csv(tmp_path / "benchmarks" / "throughput.csv", index=False)
    return main([*names, "--out", str(tmp_path / "figures")], Folders(measured=tmp_path))


def test_command_writes_both_figures_deterministically(tmp_path, throughput):
    assert run(tmp_path, throughput, "throughput", "runtime_breakdown") == 0
    files = sorted((tmp_path / "figures").iterdir())
    names = [f"{name}.{kind}" for name in ("runtime_breakdown", "throughput") for kind in ("pdf", "png", "txt")]
    assert [file.name for file in files] == names
    before = [file.read_bytes() for file in files]
    assert before[1] != before[4]
    assert run(tmp_path, throughput, "throughput") == 0
    assert [file.read_bytes() for file in files] == before


def test_too_few_machines_give_a_one_sentence_error(tmp_path, throughput, capsys):
    assert run(tmp_path, throughput[throughput["batch"] == 4], "throughput") == 2
    assert "at two batch sizes on a machine" in capsys.readouterr().err
    assert run(tmp_path, throughput[throughput["threads"] == 1], "runtime_breakdown") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "second machine configuration" in error
    assert not (tmp_path / "figures").exists()
