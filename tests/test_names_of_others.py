"""Names from Opacus are refused with their name in groupwise, and `help`, `repr` and the commands are informative."""

import pydoc
import re
import sys

import pytest
from torch import nn

import groupwise
from groupwise.__main__ import COMMANDS, main
from groupwise.errors import UserError
from groupwise.private.arguments import INSTEAD
from tests.private_use import BATCH, Use


def make(**given):
    return Use(nn.Linear(5, 2), **{"steps": 4, **given}).private


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_grad_norm", "threshold"),
        ("target_epsilon", "epsilon"),
        ("target_delta", "delta"),
        ("module", "model"),
        ("data_loader", "data"),
        ("criterion", "losses"),
        ("clipping", "clip"),
        ("grad_sample_mode", "clip"),
        ("total_steps", "steps"),
        ("max_physical_batch_size", "microbatch"),
        ("gradient_accumulation_steps", "microbatch"),
        ("batchsize", "batch_size"),
    ],
)
def test_opacus_arguments_are_refused_with_their_name_in_groupwise(theirs, ours):
    with pytest.raises(UserError, match=rf"no argument '{theirs}' \(did you mean {ours}\?\)"):
        make(**{theirs: 1})


@pytest.mark.parametrize("name", INSTEAD)
def test_opacus_arguments_without_an_equivalent_are_refused_with_advice(name):
    with pytest.raises(UserError, match=f"no argument '{name}': "):
        make(**{name: True})


def test_an_opacus_call_names_all_unknown_arguments_before_missing_ones():
    answer = r"'module' \(did you mean model\?\); nor 'data_loader' \(did you mean data\?\); nor 'max_grad_norm' \("
    with pytest.raises(UserError, match=answer):
        groupwise.make_private(module=1, optimizer=2, data_loader=3, noise_multiplier=1, max_grad_norm=1)


@pytest.mark.parametrize("name", groupwise._INSTEAD)
def test_opacus_classes_are_refused_with_advice(name):
    with pytest.raises(ImportError, match=f"no attribute '{name}': use groupwise"):
        exec(f"from groupwise import {name}")


@pytest.mark.parametrize(
    ("theirs", "ours"), [("get_epsilon", "epsilon_at(delta)"), ("accountant", "plan"), ("remove_hooks", "detach()")]
)
def test_opacus_attributes_are_refused_with_their_name_in_groupwise(theirs, ours):
    with pytest.raises(AttributeError, match=re.escape(f"no attribute '{theirs}': use private.{ours}")):
        getattr(make(), theirs)


def test_repr_of_a_private_training_and_of_its_steps():
    private = make(noise_source=None)
    assert repr(private.steps(3)) == f"Steps(private={private!r}, last=3)"
    promised = f"({private.plan.epsilon:.4g}, 0.001)-DP after all of them"
    assert repr(private) == f"<private training of a Linear: 0 of 4 steps taken; {promised}>"
    assert repr(make()).endswith("taken; NOT PRIVATE: the noise comes from a seed>")


def test_epsilon_at_another_delta():
    private = make()
    for _ in private.steps(2):
        pass
    assert private.epsilon_at(1e-3) == private.epsilon < private.epsilon_at(1e-6)
    given = {"dataset_size": 40, "expected_batch_size": BATCH, "steps": 2, "delta": 1e-6, "accountant": "rdp"}
    plan = groupwise.privacy.make_plan(**given, noise_multiplier=1.0)
    assert private.epsilon_at(1e-6) == pytest.approx(plan.epsilon, rel=1e-9)
    with pytest.raises(UserError, match="delta is 2"):
        private.epsilon_at(2)


def test_help_shows_the_public_functions():
    page = pydoc.render_doc(groupwise, renderer=pydoc.plaintext)
    assert "make_private(model, optimizer, dataset, losses" in page and "fix_model(model" in page
    assert dir(groupwise) == sorted(groupwise.__all__)
    assert all(getattr(groupwise, name) is not None for name in groupwise.__all__)


def test_the_command_lists_its_commands_and_runs_them(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["groupwise"])
    assert main() == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    monkeypatch.setattr(sys, "argv", ["groupwise", "privcy"])
    assert main() == 2 and "did you mean privacy?" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["groupwise", "privacy", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0 and "sigma=  " in capsys.readouterr().out
