"""The figure shows the right rows, and the same rows give the same bytes."""

import pandas as pd
import pytest

from groupwise.analysis.benchmark_rows import cells
from groupwise.analysis.throughput_figure import GIB, configurations, main, panels
from groupwise.errors import UserError

ONE = ("cpu", "Made-up CPU", 1, "float32")
TWO = ("cpu", "Made-up CPU", 2, "float32")


def test_machines_are_ordered_gpus_first(throughput):
    assert configurations(cells(throughput)) == [ONE, TWO]
    gpu = cells(throughput.assign(device=throughput["threads"].map({1: "cpu", 2: "cuda"})))
    assert [at[0] for at in configurations(gpu)] == ["cuda", "cpu"]


def test_panel_a_has_every_batch_and_panel_b_the_largest_that_fits(throughput):
    shown = panels(cells(throughput), workload="gpt2", machine=ONE, budget=4.0 * GIB)
    assert sorted(shown.memory[shown.memory["method"] == "flat"]["batch"]) == [1, 2, 4, 8]
    # b/2 GiB without privacy: 8 takes exactly 4; 1.01 times as much no longer fits, nor does flat's 1.5.
    assert shown.fitting["batch"].to_dict() == {
        "none": 8,
        "adaptive_layer": 4,
        "ghost": 4,
        "flat": 4,
        "opacus_hooks": 2,
    }
    assert shown.fitting.loc["none", "examples_per_second"] == 100
    assert "4 layers" in shown.caption and "1 thread" in shown.caption
    assert shown.scale == "reduced"


def test_what_fits_nowhere_is_left_out_of_panel_b_only(throughput):
    shown = panels(cells(throughput), workload="gpt2", machine=ONE, budget=1.0 * GIB)
    assert "opacus_hooks" not in shown.fitting.index and "opacus_hooks" in set(shown.memory["method"])
    assert shown.absent == {}


def test_a_method_that_refused_is_named_with_its_words(throughput):
    hooks = throughput["method"] == "opacus_hooks"
    refused = throughput.assign(
        examples_per_second=throughput["examples_per_second"].mask(hooks),
        status=throughput["status"].mask(hooks, "refused: no"),
    )
    assert panels(cells(refused), workload="gpt2", machine=ONE, budget=GIB).absent == {"opacus_hooks": "refused: no"}


def test_the_deepest_model_is_shown(throughput):
    deep = throughput[throughput["batch"] <= 2].assign(layers=12)
    lone = throughput[throughput["batch"] == 1].assign(layers=24)  # one batch size is no curve
    shown = panels(cells(pd.concat([throughput, deep, lone])), workload="gpt2", machine=ONE, budget=GIB)
    assert set(shown.memory["layers"]) == {12}


def test_full_depth_on_a_gpu_is_not_reduced(throughput):
    full = cells(throughput.assign(layers=12, device="cuda"))
    assert panels(full, workload="gpt2", machine=("cuda", *ONE[1:]), budget=GIB).scale == "paper"


def test_one_batch_size_is_refused(throughput):
    with pytest.raises(UserError, match="two batch sizes"):
        panels(cells(throughput[throughput["batch"] == 4]), workload="gpt2", machine=ONE, budget=GIB)


def run(tmp_path, *arguments: str) -> int:
    return main([*arguments, "--rows", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "figures")])


def test_the_command_writes_both_figures_the_same_each_time(tmp_path, throughput, capsys):
    throughput.to_csv(tmp_path / "rows.csv", index=False)
    assert run(tmp_path, "throughput") == 0 and "1 thread" in capsys.readouterr().out
    assert run(tmp_path, "runtime_breakdown") == 0 and "2 threads" in capsys.readouterr().out
    files = sorted((tmp_path / "figures").iterdir())
    assert [file.name for file in files] == [
        "runtime_breakdown.pdf",
        "runtime_breakdown.png",
        "throughput.pdf",
        "throughput.png",
    ]
    before = [file.read_bytes() for file in files]
    assert before[1] != before[3]
    assert run(tmp_path, "throughput") == 0 and run(tmp_path, "runtime_breakdown") == 0
    assert [file.read_bytes() for file in files] == before


def test_mistakes_are_one_sentence(tmp_path, throughput, capsys):
    assert run(tmp_path, "throughput") == 2
    throughput[throughput["threads"] == 1].to_csv(tmp_path / "rows.csv", index=False)
    assert run(tmp_path, "runtime_breakdown") == 2
    assert run(tmp_path, "throughput", "--budget", "0") == 2
    assert run(tmp_path, "throughput", "--threads", "64") == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all(line.startswith("error: ") for line in errors)
    assert "second machine configuration" in errors[1]
    assert not (tmp_path / "figures").exists()
