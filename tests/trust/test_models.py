"""The table of architectures: the truth is the truth, and what is wrong is said to be wrong."""

import csv
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from groupwise.clipping import ClippingEngine
from groupwise.errors import UserError
from trust.models import __main__ as command
from trust.models import check
from trust.models.__main__ import ARCHITECTURES, main, measure
from trust.models.architecture import Size, Subject
from trust.models.rows import EXACT, FALSE_ALARM, HEAD, MODES, REFUSED, TRACEBACK, WRONG, Row, summary, tables
from trust.models.truth import find_truth

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
MLP = BY_NAME["MLP"]


def statuses(architecture):
    return [row.status for row in measure(architecture, MODES)]


@pytest.fixture
def spoiled(monkeypatch):
    """Call it with what is done after each backward pass of an engine."""

    def spoil(after):
        backward = ClippingEngine.backward

        def spoiling(engine, losses):
            backward(engine, losses)
            after(engine)

        monkeypatch.setattr(ClippingEngine, "backward", spoiling)

    return spoil


@pytest.mark.parametrize("name", ["MLP", "CNN, GroupNorm", "Bilinear", "Embedding, transposed, Conv1d"])
def test_exact(name):
    rows = measure(BY_NAME[name], MODES)
    assert [(row.status, row.dropout, row.note) for row in rows] == [(EXACT, "taken", "")] * 3
    assert max(row.error for row in rows) < 1e-8


def test_the_truth_is_a_sum_of_clipped_gradients():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()
    truth = find_truth(Subject(model, {"x": x}, lambda model, batch: model(batch["x"]).squeeze(1)))
    torch.testing.assert_close(truth.norms([["weight"]]), torch.tensor([[5.0, 0.5, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[0.6 + 0.3, 0.8 + 0.4]], dtype=torch.float64)
    torch.testing.assert_close(truth.sums([["weight"]], torch.ones(1, dtype=torch.float64))["weight"], expected)


def spoil_a_sum(engine):
    engine.model.get_parameter("0.weight").grad[0, 0] += 1e-5


def spoil_a_norm(engine):
    engine.squared_norms[0] = engine.squared_norms[0] * (1 + 1e-6)


def spoil_a_count(engine):
    engine.reset()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_a_sum, "The clipped sum of '0.weight' is off by"),
        (spoil_a_norm, "A norm is off by"),
        (spoil_a_count, "The counts are wrong."),
    ],
)
def test_wrong(spoiled, spoil, says):
    spoiled(spoil)
    for row in measure(MLP, MODES):
        assert row.status == WRONG and row.faulty and row.note.startswith(says)


def test_a_sum_that_is_wrong_with_dropout_alone_is_wrong(spoiled):
    def spoil(engine):
        if engine.model[5].p:
            engine.model.get_parameter("0.weight").grad[0, 0] = torch.nan

    spoiled(spoil)
    assert isinstance(MLP.make(Size()).model[5], nn.Dropout)
    row, *_ = measure(MLP, ["flat"])
    assert (row.status, row.dropout, row.faulty) == (EXACT, WRONG, True)


def test_a_refusal_of_what_is_exact_is_a_false_alarm(monkeypatch):
    def refuse(*_):
        raise UserError("Layer '0' looks odd.")

    monkeypatch.setattr(check, "verify", refuse)
    for row in measure(MLP, MODES):
        assert row.status == FALSE_ALARM and row.faulty and row.note.endswith("Layer '0' looks odd.")


def test_a_refusal_of_what_is_wrong_is_none(monkeypatch, spoiled):
    def refuse(*_):
        raise UserError("Layer '0' looks odd.")

    monkeypatch.setattr(check, "verify", refuse)
    spoiled(spoil_a_sum)
    row, *_ = measure(MLP, ["flat"])
    assert row.status == WRONG and "odd" not in row.note


def test_traceback(spoiled):
    def spoil(engine):
        raise KeyError("nothing")

    spoiled(spoil)
    row, *_ = measure(MLP, ["flat"])
    assert row.status == TRACEBACK and row.faulty
    assert row.note.startswith("KeyError: 'nothing' (test_models.py:")


def test_what_cannot_be_built_is_a_traceback():
    assert statuses(replace(MLP, make=lambda size: 1 / 0)) == [TRACEBACK] * 3


def test_what_mixes_must_be_refused():
    assert statuses(BY_NAME["A mean over the batch"]) == [REFUSED] * 3
    assert statuses(BY_NAME["ResNet, BatchNorm"]) == [REFUSED] * 3
    assert statuses(replace(MLP, mixes=True)) == [WRONG] * 3


def test_the_command_writes_only_whole_tables(tmp_path, monkeypatch, capsys, spoiled):
    monkeypatch.setattr(command, "RESULT", tmp_path / "models.csv")
    assert main(["--only", "MLP"]) == 0
    assert "MLP (" in capsys.readouterr().out and not command.RESULT.exists()
    monkeypatch.setattr(command, "ARCHITECTURES", (MLP,))
    assert main([]) == 0
    with command.RESULT.open(newline="") as file:
        assert [row["mode"] for row in csv.DictReader(file)] == list(MODES)
    spoiled(spoil_a_sum)
    assert main(["--modes", "flat"]) == 1
    assert "MLP, flat" in capsys.readouterr().err


def test_the_table_shows_each_mode_and_each_sentence_once():
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


def test_the_committed_rows_are_those_of_the_list():
    assert len(ARCHITECTURES) >= 60 and max(Counter(a.name for a in ARCHITECTURES).values()) == 1
    with command.RESULT.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["status"] for row in found} == {"exact", "refused"}
    rows = [(row["architecture"], row["mode"]) for row in found]
    assert rows == [(architecture.name, mode) for architecture in ARCHITECTURES for mode in MODES]
