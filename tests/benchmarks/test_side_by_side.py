"""`benchmarks.opacus_side_by_side` compares two scripts that differ only in the library and the chosen settings."""

import pandas as pd
import pytest

from benchmarks import opacus_side_by_side as comparison
from groupwise.analysis.benchmark_tables import side_by_side_table
from groupwise.errors import UserError


def test_script_lines_skip_docstrings_comments_and_blanks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        '"""A docstring\nof two lines."""\nimport time\n\nx = []  # this line counts\n    # not this one\n'
    )
    assert comparison.script_lines(script) == 2


def test_epsilon_and_accuracy_are_read_from_the_output():
    print_both = 'import torch; print(f"epsilon 1.000, accuracy {torch.get_num_threads() / 4:.3f}")'
    assert comparison.trained(print_both, 60.0) == {"epsilon": 1.0, "accuracy": 25.0}
    for source, words in (("print(1)", "it printed no result"), ("1 / 0", "ZeroDivisionError")):
        with pytest.raises(UserError, match=words):
            comparison.trained(source, 60.0)


@pytest.mark.parametrize("method", comparison.METHODS)
def test_variant_changes_only_the_chosen_settings(method):
    script, replaced = comparison.METHODS[method]
    before, after = script.read_text().splitlines(), comparison.variant(method, 0.25, 7).splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 2 + len(replaced)
    assert sum("lr=0.25" in line for line in changed) == sum("manual_seed(7)" in line for line in changed) == 1
    assert sum('clip="flat"' in line for line in changed) == (method == "flat")


def test_scripts_have_the_same_data_model_and_settings():
    ours, theirs = (script.read_text() for script in (comparison.OURS, comparison.THEIRS))
    start, end = "images, labels = load_digits", "data = TensorDataset"
    assert ours[ours.index(start) : ours.index(end)] == theirs[theirs.index(start) : theirs.index(end)]
    for setting in ("epsilon=8", "delta=1e-5", "batch_size=256"):
        assert setting in ours and setting in theirs
    assert all("microbatch=128" in comparison.variant(method, 0.4, 0) for method in ("flat", "adaptive_layer"))
    assert "max_physical_batch_size=128" in theirs
    assert "epochs=30" in ours and "EPOCHS = 30" in theirs


def test_each_method_uses_its_best_rate_of_the_tuning_seed(capsys):
    best = {"opacus_hooks": 0.2, "flat": 0.8, "adaptive_layer": 0.1}

    def train(source: str, limit: float) -> dict[str, float]:
        method = "opacus_hooks" if "opacus" in source else "flat" if 'clip="flat"' in source else "adaptive_layer"
        good = f"lr={best[method]}" in source and f"manual_seed({comparison.TUNED_ON})" in source
        return {"epsilon": 8.0, "accuracy": 90.0 if good else 50.0}

    rows = comparison.measure(comparison.SideBySideOptions(seeds=2), train)
    results = [row for row in rows if row["role"] == "result"]
    assert {(row["method"], row["learning_rate"]) for row in results} == set(best.items())
    assert [row["seed"] for row in results] == [0, 0, 0, 1, 1, 1]
    assert len(rows) == len(comparison.METHODS) * (len(comparison.RATES) + 2)
    table = side_by_side_table(pd.DataFrame(rows))
    assert "| Opacus, hooks, 0.2 | 40 | 50.0 [50.0..50.0] | 8.000 |" in table
