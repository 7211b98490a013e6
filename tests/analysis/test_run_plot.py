"""The plot of one run has a panel for each kind of metric."""

import json

import pytest

from groupwise.analysis.run_plot import draw_run, main, read_metrics


@pytest.fixture
def folder(tmp_path):
    lines = [
        {"step": step, "nonprivate/loss": 1 / step, "epsilon_bound": step, "threshold/a": step, "threshold/b": 2.0}
        for step in (1, 2, 3)
    ] + [{"step": 3, "valid/accuracy": 50.0, "valid/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "nonpri')
    return tmp_path


def test_plot_has_a_panel_for_each_kind_of_metric(folder):
    figure = draw_run(read_metrics(folder), "a run")
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy (%)", "ε, upper bound", "threshold $C_k$"]
    thresholds = figure.axes[3].get_lines()
    assert {line.get_label() for line in thresholds} == {"a", "b"}
    assert [list(line.get_ydata()) for line in thresholds] == [[1, 2, 3], [2, 2, 2]]


def test_plot_is_written_to_the_run_folder(folder, capsys):
    assert main([str(folder)]) == 0
    assert (folder / "plot.png").stat().st_size > 1000 and "plot.pdf" in capsys.readouterr().out


def test_folder_without_metrics_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2 and "metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 2 and "no metrics yet" in capsys.readouterr().err
