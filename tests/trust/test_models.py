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
from trust.models import check, speed
from trust.models.__main__ import ARCHITECTURES, main, measure
from trust.models.architecture import Size, Subject
from trust.models.check import know
from trust.models.plain_layers import net, vectors
from trust.models.rows import (
    EXACT,
    FALSE_ALARM,
    HEAD,
    MODES,
    REFUSED,
    TRACEBACK,
    WRONG,
    Row,
    as_csv,
    read_csv,
    summary,
    tables,
)
from trust.models.truth import find_truth, parameters_of

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
MLP = BY_NAME["MLP"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def statuses(architecture):
    return [row.status for row in measure(architecture, MODES, speed=False)]


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
    rows = measure(BY_NAME[name], MODES, speed=False)
    assert [(row.status, row.dropout, row.note) for row in rows] == [(EXACT, "taken", "")] * 3
    assert max(row.error for row in rows) < 1e-8
    assert [row.groups == 1 for row in rows] == [True, True, False]


def test_the_truth_is_a_sum_of_clipped_gradients():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()
    truth = find_truth(Subject(model, {"x": x}, lambda model, batch: model(batch["x"]).squeeze(1)))
    torch.testing.assert_close(truth.norms([["weight"]]), torch.tensor([[5.0, 0.5, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[0.6 + 0.3, 0.8 + 0.4]], dtype=torch.float64)
    torch.testing.assert_close(truth.sums([["weight"]], torch.ones(1, dtype=torch.float64))["weight"], expected)


def test_parameters_are_those_of_the_innermost_layer_that_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1][1].weight = model[0].weight
    groups = parameters_of(model, (("0", "1.1"), ("1",)))
    assert groups == [["0.weight", "0.bias", "1.1.bias"], ["1.0.weight", "1.0.bias"]]
    with pytest.raises(ValueError, match=r"0\.weight is in two groups|1\.1\.weight is in two groups"):
        parameters_of(model, (("0",), ("1",)))
    with pytest.raises(ValueError, match="in no group"):
        parameters_of(model, (("0",),))


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
    for row in measure(MLP, MODES, speed=False):
        assert row.status == WRONG and row.faulty and row.note.startswith(says)


def test_a_sum_that_is_wrong_with_dropout_alone_is_wrong(spoiled):
    def spoil(engine):
        if engine.model[5].p:
            engine.model.get_parameter("0.weight").grad[0, 0] = torch.nan

    spoiled(spoil)
    assert isinstance(MLP.make(Size()).model[5], nn.Dropout)
    row, *_ = measure(MLP, ["flat"], speed=False)
    assert (row.status, row.dropout, row.faulty) == (EXACT, WRONG, True)


def test_what_is_wrong_with_as_many_examples_as_tokens_alone_is_wrong(spoiled):
    def spoil(engine):
        if engine.examples == Size().tokens != Size().batch:
            spoil_a_sum(engine)

    spoiled(spoil)
    row, *_ = measure(MLP, ["flat"], speed=False)
    assert row.status == WRONG and row.note.startswith("With as many examples as tokens: The clipped sum of '0.weight'")


def test_a_refusal_of_what_is_exact_is_a_false_alarm(monkeypatch):
    def refuse(*_):
        raise UserError("Layer '0' looks odd.")

    monkeypatch.setattr(check, "verify", refuse)
    for row in measure(MLP, MODES, speed=False):
        assert row.status == FALSE_ALARM and row.faulty and row.note.endswith("Layer '0' looks odd.")


def test_a_refusal_of_what_is_wrong_is_none(monkeypatch, spoiled):
    def refuse(*_):
        raise UserError("Layer '0' looks odd.")

    monkeypatch.setattr(check, "verify", refuse)
    spoiled(spoil_a_sum)
    row, *_ = measure(MLP, ["flat"], speed=False)
    assert row.status == WRONG and "odd" not in row.note


def test_what_is_wrong_in_a_batch_of_one_alone_is_wrong(spoiled):
    def spoil(engine):
        if engine.examples == 1:
            spoil_a_sum(engine)

    spoiled(spoil)
    row, *_ = measure(MLP, ["flat"], speed=False)
    assert row.status == WRONG


def test_traceback(spoiled):
    def spoil(engine):
        raise KeyError("nothing")

    spoiled(spoil)
    row, *_ = measure(MLP, ["flat"], speed=False)
    assert row.status == TRACEBACK and row.faulty
    assert row.note.startswith("KeyError: 'nothing' (test_models.py:")


def test_what_cannot_be_built_is_a_traceback():
    assert statuses(replace(MLP, make=lambda size: 1 / 0)) == [TRACEBACK] * 3


def test_what_mixes_must_be_refused():
    assert statuses(BY_NAME["A mean over the batch"]) == [REFUSED] * 3
    assert statuses(BY_NAME["ResNet, BatchNorm"]) == [REFUSED] * 3
    assert statuses(replace(MLP, mixes=True)) == [WRONG] * 3


def test_a_model_that_computes_in_float32_is_not_blamed_for_it():
    class Single(nn.Module):
        def forward(self, x):
            return torch.softmax(x.float(), 1, dtype=torch.float32).to(x.dtype)

    architecture = net("single", lambda size: nn.Sequential(nn.Linear(16, 3), Single(), nn.Linear(3, 3)), vectors)
    assert statuses(architecture) == [EXACT] * 3
    assert torch.float32 is not torch.float64 and torch.get_default_dtype() == torch.float32


def test_parameters_without_a_loss_are_frozen_and_counted():
    class Idle(nn.Linear):
        def __init__(self):
            super().__init__(16, 3)
            self.idle = nn.Linear(2, 2)

    rows = measure(net("idle", lambda size: nn.Sequential(Idle()), vectors), MODES, speed=False)
    assert [row.frozen for row in rows] == [2] * 3


def test_speed_is_measured_where_the_mode_is_exact(monkeypatch):
    monkeypatch.setattr(speed, "SHORTEST", 0.0)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "LARGE", Size(width=16))
    known = know(MLP)
    rows = [Row("torch.nn", "MLP", "flat", EXACT), Row("torch.nn", "MLP", "ghost", REFUSED, note="No.")]
    first, second = speed.with_speed(MLP, known, rows)
    assert first.plain_ms > 0 and first.private_ms > 0
    assert second == rows[1]


def test_the_command_writes_only_whole_tables(tmp_path, monkeypatch, capsys, spoiled):
    monkeypatch.setattr(command, "RESULT", tmp_path / "trust" / "models.csv")
    assert main(["--only", "MLP", "--no-speed"]) == 0
    assert "MLP (" in capsys.readouterr().out and not command.RESULT.exists()
    monkeypatch.setattr(command, "ARCHITECTURES", (MLP,))
    assert main(["--no-speed"]) == 0
    with command.RESULT.open(newline="") as file:
        assert [row["mode"] for row in csv.DictReader(file)] == list(MODES)
    spoiled(spoil_a_sum)
    assert main(["--no-speed", "--modes", "flat"]) == 1
    assert "MLP, flat" in capsys.readouterr().err


def test_rows_of_a_package_that_is_not_installed_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RESULT", tmp_path / "models.csv")
    monkeypatch.setattr(command, "ARCHITECTURES", (MLP, replace(MLP, name="other", needs="not_there")))
    row = Row("torch.nn", "other", "flat", EXACT, 1e-16, "taken", 1, 2, 0, 0, 2.0, 3.0)
    command.RESULT.write_text(as_csv([row]))
    assert main(["--no-speed"]) == 0
    assert "other: skipped, not_there is not installed" in capsys.readouterr().out
    assert read_csv(command.RESULT.read_text())[3:] == [row]


def test_the_table_shows_each_mode_and_each_sentence_once():
    rows = [
        Row("torch.nn", "MLP", "flat", EXACT, 1e-16, "taken", plain_ms=2.0, private_ms=3.0),
        Row("torch.nn", "MLP", "ghost", REFUSED, note="No | and <no>."),
        Row("torch.nn", "MLP", "per_layer", EXACT, 2e-16, REFUSED, note="No | and <no>."),
    ]
    read = list(csv.DictReader(as_csv(rows).splitlines()))
    assert tuple(read[0]) == HEAD
    text = tables(read)
    assert "| MLP | exact, 1.50 × | refused (1) | exact, dropout refused (1) |" in text
    assert text.count("1. No \\| and &lt;no>.") == 1
    assert "`flat`: 1 exact; 1.50 ×" in summary(read) and "`ghost`: 1 refused." in summary(read)


def test_the_committed_rows_are_those_of_the_list():
    assert len(ARCHITECTURES) >= 60 and max(Counter(a.name for a in ARCHITECTURES).values()) == 1
    with command.RESULT.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["status"] for row in found} == {"exact", "refused"}
    rows = [(row["architecture"], row["mode"]) for row in found]
    assert rows == [(architecture.name, mode) for architecture in ARCHITECTURES for mode in MODES]
