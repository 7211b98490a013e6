"""The planner's command line: what it reads, and one sentence for each mistake."""

import re

import pytest

from groupwise.options import read
from groupwise.planner.__main__ import main
from groupwise.planner.options import PlanOptions


def test_values_are_read_by_type():
    given = ["model=opt_66b", "devices=8", "epochs=2.5", "rematerialize=false", "dtype=bfloat16"]
    options = read(PlanOptions, [*given, "memory=40"])
    assert (options.devices, options.epochs, options.rematerialize, options.dtype) == (8, 2.5, False, "bfloat16")
    assert options.room == pytest.approx(40e9 - 1e9)
    assert read(PlanOptions, [*given, "microbatch=null"]).microbatch is None
    assert (PlanOptions().weights_dtype, PlanOptions().room) == ("bfloat16", 80 * 2**30 - 1e9)  # of the accelerator


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("devices", "cannot be read as key=value"),
        ("device=3", r"no key device \(did you mean devices\?\)"),
        ("devices=two", "devices=two does not fit: a whole number"),
        ("devices=0", "devices=0 was given; give a finite number above 0"),
        ("epochs=inf", "epochs=inf was given"),
        ("rank=-1", "rank=-1 was given"),
        ("rematerialize=perhaps", "rematerialize=perhaps does not fit: true or false"),
        ("memory=much", "memory=much does not fit: a number"),
        ("memory=0", "memory=0 was given"),
        ("accelerator=v100_32g", r"v100_32g is unknown.*did you mean v100_32gb"),
        ("dtype=bfloat16 accelerator=v100_32gb", "dtype=bfloat16 has no known speed on a v100_32gb; give float32"),
        ("rank=0 dtype=bfloat16", "rank=0 trains all parameters in float32, so dtype=bfloat16 has no effect"),
        ("batch=20000", "batch=20000 is more than examples=14732"),
        ("microbatch=200", "microbatch=200 is more than batch=128"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(argument, message, capsys):
    assert main(argument.split()) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1 and re.search(message, output)


def test_help_names_every_key(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert "devices=16" in output and all(f"  {key}=" in output for key in vars(PlanOptions()))
