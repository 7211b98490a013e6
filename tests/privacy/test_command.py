"""`python -m groupwise.privacy`: σ for an ε, ε for a σ, and ε after each tenth of the steps."""

import re
import sys

import pytest

from groupwise.privacy import make_plan
from groupwise.privacy.__main__ import main

SETTING = "n=5000 batch=500 steps=100 delta=1e-5"


def run(words: str, monkeypatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["privacy", *words.split()])
    return main(), *capsys.readouterr()


def test_sigma_for_an_epsilon_gives_that_epsilon_back(monkeypatch, capsys):
    code, out, _ = run(f"epsilon=4 {SETTING}", monkeypatch, capsys)
    plan = make_plan(dataset_size=5000, expected_batch_size=500, steps=100, delta=1e-5, epsilon=4)
    assert code == 0 and out.startswith(plan.statement())
    rows = [line.split() for line in out.splitlines()[-10:]]
    assert [row[0] for row in rows] == [str(step) for step in range(10, 101, 10)]
    assert [row[1] for row in rows] == [f"{step / 10:.1f}" for step in range(10, 101, 10)]
    assert float(rows[4][2]) == round(plan.spent_epsilon(50), 4) and 3.99 < float(rows[-1][2]) <= 4
    sigma = re.search(r"sigma\s+=\s+([\d.]+)", out).group(1)
    _, back, _ = run(f"sigma={sigma} {SETTING}", monkeypatch, capsys)
    assert abs(float(back.split()[-1]) - 4) < 0.01
    aliases = f"noise_multiplier={sigma} {SETTING}".replace("batch", "batch_size").replace("n=", "dataset_size=")
    assert run(aliases, monkeypatch, capsys) == (0, back, "")


def test_epochs_are_steps_and_delta_has_a_default(monkeypatch, capsys):
    _, out, _ = run("sigma=1 n=5000 batch=500 epochs=10", monkeypatch, capsys)
    assert "100 steps" in out and f"delta = {5000**-1.1:g}" in out


def test_help_is_printed(monkeypatch, capsys):
    for words in ("--help", "epsilon=3 -h"):
        code, out, _ = run(words, monkeypatch, capsys)
        assert code == 0 and out.startswith("Computes σ for a given ε") and "  delta= " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"epsilon=4 sigma=1 {SETTING}", "give one of epsilon and sigma"),
        (SETTING, "give one of epsilon and sigma"),
        ("epsilon=4 n=5000 batch=500", "give one of epochs and steps"),
        ("epsilon=4 batch=500 steps=3", "n is missing"),
        ("epsilon=4 n=5000 bach=500 steps=3", "did you mean batch?"),
        ("epsilon=four n=5000 batch=500 steps=3", "epsilon=four does not fit"),
        ("epsilon=4 n=inf batch=500 steps=3", "n=inf does not fit: a whole number"),
        ("epsilon=4 n=5000 batch=nan steps=3", "batch=nan does not fit"),
        ("epsilon=4 n=5000 batch=5001 steps=3", "at most n"),
        ("epsilon=4 n=5000.5 batch=500 steps=3", "n=5000.5 does not fit: a whole number"),
        ("epsilon=4 n=5000 batch=500 steps=3.5", "steps=3.5 does not fit: a whole number"),
        ("epsilon=4 n=5000 batch=500 epochs=0", "epochs=0 was given"),
        (f"epsilon=4 {SETTING} accountant=moments", "accountant=moments is unknown"),
    ],
)
def test_mistakes_are_one_sentence(words, message, monkeypatch, capsys):
    code, out, err = run(words, monkeypatch, capsys)
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err and err.count("\n") == 1
