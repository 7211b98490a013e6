"""Figures are deterministic, show all of their rows, and state when these are at a reduced scale."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest

from groupwise.analysis.figure_style import CLIP, TIMED, WEAK, References, with_settings
from groupwise.analysis.figures import FIGURES, KINDS, OURS, SPEED, Drawn, main, make
from groupwise.analysis.results import Folders
from groupwise.analysis.run_figures import chosen_layers


def texts(figure) -> list:
    import matplotlib.text

    return figure.findobj(matplotlib.text.Text)


def words(figure) -> str:
    """All text of a figure, and its caption."""
    return " ".join([*(text.get_text() for text in texts(figure)), figure.get_label()])


def run(folders, out, *names: str) -> int:
    return main([*names, "--out", str(out)], folders)


@pytest.fixture(scope="session")
def drawn(unchanged) -> Callable[[str], Drawn]:
    """A function that draws each figure once from the unchanged rows; tests must not change the figures."""
    return cache(partial(make, folders=unchanged))


@pytest.mark.parametrize("name", KINDS)
def test_reduced_figure_is_labelled_as_reduced(drawn, name):
    drawn = drawn(name)
    assert drawn.scale == "mini"
    assert "Reduced, no reproduction: scale=mini" in words(drawn.figure)
    assert "reduced" in words(drawn.figure).split()
    assert all(axes.patch.get_hatch() is None for axes in drawn.figure.axes)  # no hatch covers the data


@pytest.mark.parametrize("name", KINDS)
def test_figure_at_paper_scale_is_not_labelled_as_reduced(folders, name):
    for path in folders.measured.glob(f"{name}_mini*.csv"):
        frame = pd.read_csv(path).assign(scale="paper")
        frame.to_csv(path.with_name(path.name.replace("_mini", "_paper")), index=False)
    drawn = make(name, folders)
    assert drawn.scale == "paper" and "reduced" not in words(drawn.figure).lower()


@pytest.mark.parametrize("name", OURS)
def test_figure_that_is_not_in_the_paper_is_drawn_from_committed_rows(name):
    drawn = make(name, Folders.of_checkout())
    assert {axes.get_title("right") for axes in drawn.figure.axes} == {"reduced"}
    caption, absent = drawn.figure.get_label(), set(drawn.runs.expected) - set(drawn.runs.rows["cell"])
    assert "Reduced, no reproduction: scale=midi" in caption and ("Not run, numbers of epochs: " in caption) == bool(
        absent
    )
    assert "Learning rates, by number of epochs: flat, ε = 3 (4, 2, 2)" in caption
    assert ". Flag: 1 of 3 runs with uncommitted changes (cells: " in caption


@pytest.mark.slow
def test_command_writes_the_same_bytes_each_time(folders, tmp_path, throughput, capsys):
    (folders.measured / "benchmarks").mkdir()
    throughput.to_csv(folders.measured / "benchmarks" / "throughput.csv", index=False)
    for out in ("one", "two"):
        assert run(folders, tmp_path / out, *KINDS, *SPEED) == 0
    files = sorted((tmp_path / "one").iterdir())
    names = sorted(f"{name}.{kind}" for name in (*KINDS, *SPEED) for kind in ("pdf", "png", "txt"))
    assert [file.name for file in files] == names
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    assert capsys.readouterr().err == ""


def test_figure_without_rows_is_an_error_and_others_are_drawn(folders, tmp_path, capsys):
    for path in folders.measured.iterdir():
        if not path.name.startswith("target_quantile"):
            path.unlink()
    assert run(folders, tmp_path / "out", "all") == 2
    assert [line[:7] for line in capsys.readouterr().err.splitlines()] == ["error: "] * (len(FIGURES) - 1)
    assert (tmp_path / "out" / "target_quantile.png").is_file()
    assert run(folders, tmp_path / "out", "runtime_nll") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: There are no rows of runtime_nll") and "make sweep-runtime_nll SCALE=mini" in error
    assert run(folders, tmp_path / "out", "runtime_nl") == 2
    assert capsys.readouterr().err.startswith("error: There is no figure runtime_nl (did you mean runtime_nll?)")
    assert run(folders, tmp_path / "out" / "target_quantile.png", "target_quantile") == 2
    assert "target_quantile.png: File exists" in capsys.readouterr().err


def test_every_method_and_budget_is_shown(drawn):
    shown = {text.get_text() for text in texts(drawn("adaptive_vs_fixed").figure)}
    assert shown >= {"flat", "fixed per layer", "adaptive per layer", "no noise", "ε = 3"}
    figure = drawn("target_quantile").figure
    assert [axes.get_title("left") for axes in figure.axes] == ["CIFAR-10", "SST-2"]
    assert [len(line.get_xdata()) for line in figure.axes[0].containers[0].lines[:1]] == [7]
    assert not any(bars.has_yerr for bars in figure.axes[0].containers)  # one seed


@pytest.mark.parametrize("name", KINDS)
def test_no_text_is_cut_off(drawn, name):
    """Everything lies within the figure, and no text is smaller than six points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = drawn(name).figure
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (left, bottom), (right, top) = figure.get_tightbbox(canvas.get_renderer()).get_points()
    width, height = figure.get_size_inches()
    assert left > -0.01 and bottom > -0.01 and right < width + 0.01 and top < height + 0.01
    assert min(text.get_fontsize() for text in texts(figure) if text.get_text()) >= 6


@pytest.mark.parametrize("name", ["adaptive_vs_fixed", "runtime_nll", "runtime_metrics"])
def test_mode_has_the_same_colour_in_every_figure(drawn, name):
    colours = {series.label: series.colour for series in (*CLIP.values(), *TIMED.values())}
    found = 0
    for axes in drawn(name).figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            line = handle.lines[0] if hasattr(handle, "lines") else handle
            assert line.get_color() == colours[label]
            found += 1
    assert found >= 3


FLOORS = References({("cifar", "valid/accuracy"): 10.0, ("sst2", "valid/accuracy"): 78.0, ("e2e", "test/bleu"): 50.0})


def rows_of(folders, name):
    suffix = KINDS[name].suffix
    frame = pd.read_csv(folders.measured / f"{name}_mini{suffix}.csv")
    return with_settings(frame.assign(scale="mini")).copy()


def test_values_near_the_constant_baseline_are_grey(folders):
    draw, rows = KINDS["quantile_budget"].draw, rows_of(folders, "quantile_budget")
    axes = draw(rows, FLOORS).axes[0]
    values = [(line.get_color(), y) for bars in axes.containers for line in bars.lines[:1] for y in line.get_ydata()]
    assert len(values) == 16
    assert all((colour == WEAK) == (y < 83) for colour, y in values)
    assert "constant prediction: 78.0" in words(axes.figure)
    assert "Grey crosses: " in axes.figure.get_label()
    assert "crosses" not in draw(rows, References({("sst2", "valid/accuracy"): 20.0})).get_label()


@pytest.mark.parametrize("name", ["runtime_nll", "runtime_metrics"])
def test_panels_of_runs_that_learned_nothing_are_called_uninformative(folders, name):
    for bleu, faded in ((50.0, True), (-10.0, False)):
        figure = KINDS[name].draw(rows_of(folders, name), References({("e2e", "test/bleu"): bleu}))
        for axes in figure.axes:
            assert ("uninformative" in [text.get_text() for text in axes.texts]) == faded
        assert ("Faded" in figure.get_label()) == faded


def test_caption_names_budget_model_training_and_machine(drawn):
    caption = drawn("runtime_nll").figure.get_label()
    assert "ε = 8;" in caption and caption.endswith("Ours: gpt2_mini, epochs 0.25, steps 41, on cpu (x86_64).")
    assert "512 training examples" in drawn("gradnorm_sst2").figure.get_label()


def test_error_bars_are_t_intervals_over_seeds(drawn, unchanged):
    here = drawn("adaptive_vs_fixed").figure.axes[0]
    rows = pd.read_csv(unchanged.measured / "adaptive_vs_fixed_mini.csv")
    seeds = sum(len(line.get_ydata()) for line in here.get_lines() if line.get_marker() == ".")
    assert seeds == len(rows)
    flat = rows[(rows["cell"] == "clip=flat privacy.epsilon=3 task=cifar")]["valid/accuracy"]
    low, high = here.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert len(flat) == 10 and (high - low) / 2 == pytest.approx(2.26216 * flat.std() / 10**0.5, rel=1e-5)


def test_both_tasks_have_the_same_axis_span(drawn):
    one, two = (np.ptp(axes.get_ylim()) for axes in drawn("target_quantile").figure.axes)
    assert one == pytest.approx(two)


def test_values_of_the_paper_have_their_own_markers(drawn):
    here, paper = drawn("adaptive_vs_fixed").figure.axes
    values = sorted(float(y) for bars in paper.containers for y in bars.lines[0].get_ydata())
    assert values == [60.6, 63.1, 63.7, 67.8, 73.5, 73.9]
    marks = {bars.lines[0].get_marker() for bars in paper.containers}
    assert marks.isdisjoint({bars.lines[0].get_marker() for bars in here.containers})
    assert all(bars.lines[0].get_linestyle() == "None" for bars in paper.containers)
    assert not paper.get_lines() or {line.get_linestyle() for line in paper.get_lines()} <= {"None"}


def test_heatmap_has_a_row_per_example_and_a_column_per_layer(drawn, unchanged):
    figure = drawn("gradnorm_cifar").figure
    panels = [axes for axes in figure.axes if axes.images]
    assert panels[-1].images[0].colorbar.extend == "min" and "1 % quantile are white" in figure.get_label()
    rows = pd.read_csv(unchanged.measured / "gradnorm_cifar_mini_norms.csv")
    assert [axes.get_title("left") for axes in panels] == [f"epoch {epoch:g}" for epoch in rows["epoch"].unique()]
    convolutions = rows[(rows["epoch"] == 0) & ~rows["name"].str.contains("norm")]["norm"].median()
    labels = [label.get_text() for label in panels[0].get_xticklabels()]
    assert labels[0] == f"conv.\nmedian {convolutions:.1f}" and labels[1].startswith("norm\nmedian ")
    assert panels[0].images[0].get_array().shape == (rows["example"].nunique(), rows["layer"].nunique())


def test_task_without_rows_is_an_empty_panel(folders):
    path = folders.measured / "target_quantile_mini.csv"
    frame = pd.read_csv(path)
    frame[frame["cell"].str.contains("task=cifar")].to_csv(path, index=False)
    assert "not run" in words(make("target_quantile", folders).figure)


def test_layers_of_the_paper_are_chosen():
    names = ["embeddings", *(f"layer.{place}.{part}" for place in range(12) for part in ("query", "value")), "out_proj"]
    norms = pd.DataFrame({"layer": range(len(names)), "name": names})
    assert chosen_layers(norms) == ["embeddings", "layer.5.value", "layer.11.value", "out_proj"]
    assert len(chosen_layers(norms.head(4))) == 4
