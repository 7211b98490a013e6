"""`benchmarks.pipeline` with the smallest pipeline: predicted memory is close to measured memory."""

import pandas as pd
import pytest

from benchmarks import pipeline


@pytest.mark.slow
def test_planner_predicts_peak_memory_within_ten_percent(tmp_path):
    given = ["tiny=true", "shape=full_4", "method=all", f"out={tmp_path}"]
    assert pipeline.main(given) == 0
    rows = pd.read_csv(tmp_path / "pipeline.csv")
    assert list(rows["method"]) == ["none", "device"]
    assert rows["memory_error"].abs().max() < 0.1
