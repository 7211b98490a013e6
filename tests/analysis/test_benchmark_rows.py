"""Rounds become medians with their spread; doublings become factors beside those of non-private training."""

import pytest

from groupwise.analysis.benchmark_rows import cells, growth_factors, read_rows, was_measured
from groupwise.errors import UserError


def test_cells_are_medians_over_rounds_with_their_spread(throughput):
    table = cells(throughput)
    (line,) = table[(table["method"] == "flat") & (table["batch"] == 8)].to_dict("records")
    assert line["rounds"] == 3
    assert line["ratio"] == pytest.approx(0.88 * 1.01)
    assert (line["ratio_least"], line["ratio_most"]) == pytest.approx((0.88, 0.88 * 1.02))
    assert line["examples_per_second"] == pytest.approx(88 * 1.01)
    assert line["peak_bytes"] == 8 / 2 * 1.5 * 2**30


def test_cells_come_in_the_order_of_tables_and_keep_refusals(throughput):
    table = cells(throughput.sample(frac=1, random_state=0))
    here = table[(table["batch"] == 4) & (table["threads"] == 1)]
    assert here["method"].tolist() == [
        *("none", "none_again", "adaptive_layer", "flat", "ghost", "opacus_hooks", "opacus_ghost")
    ]
    assert was_measured(here).tolist() == [True] * 6 + [False]
    assert here["status"].iloc[-1] == "refused: tied weights | no" and here["rounds"].iloc[-1] == 0


def test_a_method_that_died_on_the_way_was_not_measured(throughput):
    died = (throughput["method"] == "ghost") & (throughput["round"] == 1)
    table = cells(throughput.assign(status=throughput["status"].mask(died, "refused: out of memory")))
    ghost = table["method"] == "ghost"
    assert set(table[ghost]["status"]) == {"refused: out of memory"}
    assert not was_measured(table)[ghost].any() and was_measured(table)[table["method"] == "flat"].all()


def test_growth_is_by_doubling_beside_non_private(growth):
    table = growth_factors(growth)
    flat = table[table["method"] == "flat"]
    assert flat[["start", "end"]].to_numpy().tolist() == [[2, 4], [4, 8]]
    assert flat["time"].tolist() == pytest.approx([2.2, 2.2])
    assert flat["memory"].tolist() == pytest.approx([2.5, 2.5])
    assert flat["none_time"].tolist() == pytest.approx([2.0, 2.0])
    assert flat["none_memory"].tolist() == pytest.approx([2.0, 2.0])


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="make bench"):
        read_rows(tmp_path / "throughput.csv")
