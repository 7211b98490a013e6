"""The planner's check against measurement: its options, its table, and a pipeline of the smallest size."""

import pandas as pd
import pytest

from benchmarks import pipeline


@pytest.mark.slow
def test_the_planner_foretells_the_memory_of_processes(tmp_path):
    given = ["tiny=true", "shape=full_4", "method=device,flat", f"out={tmp_path}"]
    assert pipeline.main(given) == 0
    rows = pd.read_csv(tmp_path / "pipeline.csv")
    assert list(rows["method"]) == ["device", "flat"]
    assert rows["memory_error"].abs().max() < 0.1
