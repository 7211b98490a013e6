"""`trust.models` compares engines with a correct reference, and reports wrong sums, norms and counts."""

import csv
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from groupwise.clipping import ClippingEngine
from groupwise.errors import UserError
from trust import random_networks
from trust.models import __main__ as command
from trust.models import check
from trust.models.__main__ import ARCHITECTURES, main, measure
from trust.models.architecture import Size, Subject
from trust.models.rows import EXACT, FALSE_ALARM, HEAD, MODES, REFUSED, TRACEBACK, WRONG, Row, summary, tables
from trust.models.truth import find_truth
from trust.random_networks import errors_of

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
MLP = BY_NAME["MLP"]


def statuses(architecture):
    return [row.status for row in measure(architecture, MODES)]


@pytest.fixture
def patch_backward(monkeypatch):
    """A function that makes engines call `after` at the end of each backward pass."""

    def corrupt(after):
        backward = ClippingEngine.backward

        def patched(engine, losses):
            backward(engine, losses)
            after(engine)

        monkeypatch.setattr(ClippingEngine, "backward", patched)

    return corrupt


@pytest.mark.parametrize("name", ["MLP", "CNN, GroupNorm", "Bilinear", "Embedding, transposed, Conv1d"])
def test_correct_engine_is_exact(name):
    rows = measure(BY_NAME[name], MODES)
    assert [(row.status, row.dropout, row.note) for row in rows] == [(EXACT, "taken", "")] * 3
    assert max(row.error for row in rows) < 1e-8


def test_reference_is_a_sum_of_clipped_gradients():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()
    truth = find_truth(Subject(model, {"x": x}, lambda model, batch: model(batch["x"]).squeeze(1)))
    torch.testing.assert_close(truth.norms([["weight"]]), torch.tensor([[5.0, 0.5, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[0.6 + 0.3, 0.8 + 0.4]], dtype=torch.float64)
    torch.testing.assert_close(truth.sums([["weight"]], torch.ones(1, dtype=torch.float64))["weight"], expected)


def corrupt_sum(engine):
    engine.model.get_parameter("0.weight").grad[0, 0] += 1e-5


def corrupt_norm(engine):
    engine.squared_norms[0] = engine.squared_norms[0] * (1 + 1e-6)


def corrupt_count(engine):
    engine.reset()


@pytest.mark.parametrize(
    ("corrupt", "note"),
    [
        (corrupt_sum, "The clipped sum of '0.weight' is off by"),
        (corrupt_norm, "A norm is off by"),
        (corrupt_count, "The counts are wrong."),
    ],
)
def test_wrong_result_is_reported(patch_backward, corrupt, note):
    patch_backward(corrupt)
    for row in measure(MLP, MODES):
        assert row.status == WRONG and row.faulty and row.note.startswith(note)


def test_sum_that_is_wrong_only_with_dropout_is_faulty(patch_backward):
    def corrupt(engine):
        if engine.model[5].p:
            engine.model.get_parameter("0.weight").grad[0, 0] = torch.nan

    patch_backward(corrupt)
    assert isinstance(MLP.make(Size()).model[5], nn.Dropout)
    row, *_ = measure(MLP, ["flat"])
    assert (row.status, row.dropout, row.faulty) == (EXACT, WRONG, True)


@pytest.fixture
def everything_looks_odd(monkeypatch):
    """The check before training refuses every model."""

    def refuse(*_):
        raise UserError("Layer '0' looks odd.")

    monkeypatch.setattr(check, "verify", refuse)


def test_refusal_of_an_exact_model_is_a_false_alarm(everything_looks_odd):
    for row in measure(MLP, MODES):
        assert row.status == FALSE_ALARM and row.faulty and row.note.endswith("Layer '0' looks odd.")


def test_refusal_of_a_wrong_model_is_no_false_alarm(everything_looks_odd, patch_backward):
    patch_backward(corrupt_sum)
    row, *_ = measure(MLP, ["flat"])
    assert row.status == WRONG and "odd" not in row.note


def test_exception_is_a_traceback(patch_backward):
    def corrupt(engine):
        raise KeyError("nothing")

    patch_backward(corrupt)
    row, *_ = measure(MLP, ["flat"])
    assert row.status == TRACEBACK and row.faulty
    assert row.note.startswith("KeyError: 'nothing' (test_models.py:")


def test_failing_build_is_a_traceback():
    assert statuses(replace(MLP, make=lambda size: 1 / 0)) == [TRACEBACK] * 3


def test_mixing_models_must_be_refused():
    assert statuses(BY_NAME["A mean over the batch"]) == [REFUSED] * 3
    assert statuses(BY_NAME["ResNet, BatchNorm"]) == [REFUSED] * 3
    assert statuses(replace(MLP, mixes=True)) == [WRONG] * 3


def test_command_writes_only_complete_tables(tmp_path, monkeypatch, capsys, patch_backward):
    monkeypatch.setattr(command, "RESULT", tmp_path / "models.csv")
    assert main(["--only", "MLP"]) == 0
    assert "MLP (" in capsys.readouterr().out and not command.RESULT.exists()
    monkeypatch.setattr(command, "ARCHITECTURES", (MLP,))
    assert main([]) == 0
    with command.RESULT.open(newline="") as file:
        assert [row["mode"] for row in csv.DictReader(file)] == list(MODES)
    patch_backward(corrupt_sum)
    assert main(["--modes", "flat"]) == 1
    assert "MLP, flat" in capsys.readouterr().err


def test_table_shows_each_mode_and_each_message_once():
    rows = [
        Row("torch.nn", "MLP", "flat", EXACT, 1e-16, "taken"),
        Row("torch.nn", "MLP", "ghost", REFUSED, note="No | and <no>."),
        Row("torch.nn", "MLP", "per_layer", EXACT, 2e-16, REFUSED, note="No | and <no>."),
    ]
    read = [dict(zip(HEAD, row.line, strict=True)) for row in rows]
    text = tables(read)
    assert "| MLP | exact | refused (1) | exact, dropout refused (1) |" in text
    assert text.count("1. No \\| and &lt;no>.") == 1
    assert "`flat`: 1 exact." in summary(read) and "`ghost`: 1 refused." in summary(read)


def test_committed_rows_are_those_of_the_list():
    assert len(ARCHITECTURES) >= 60 and max(Counter(a.name for a in ARCHITECTURES).values()) == 1
    with command.RESULT.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["status"] for row in found} == {"exact", "refused"}
    rows = [(row["architecture"], row["mode"]) for row in found]
    assert rows == [(architecture.name, mode) for architecture in ARCHITECTURES for mode in MODES]


@pytest.mark.parametrize("seed", range(5))
def test_random_networks_are_clipped_exactly(seed):
    assert max(errors_of(seed)) < 1e-8


@pytest.mark.parametrize("count", ["0", "x", "-1"])
def test_wrong_number_of_random_networks_is_refused(count, capsys):
    assert random_networks.main(count) == 2
    assert capsys.readouterr().err.startswith(f"error: '{count}' was given")
