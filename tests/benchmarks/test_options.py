"""Options: lists by commas, and one sentence for a mistake."""

import pytest

from benchmarks.methods import METHODS
from benchmarks.options import HELP, Options, cases, parse
from benchmarks.research_peers import package_of
from benchmarks.workloads import WORKLOADS
from groupwise.errors import UserError


def test_the_defaults_are_everything_at_reduced_depth() -> None:
    options = parse([])
    assert options == Options()
    assert set(WORKLOADS) - set(options.workloads) == {"gpt2_64", "lora_gpt2_xl"}  # only when they are named
    assert set(METHODS) - set(options.methods) == {"none_again", *filter(package_of, METHODS)}
    depths = {case.workload: case.layers for case in cases(options)}
    assert depths["gpt2"] == 4 and depths["mlp"] is None
    assert options.rounds >= 5


def test_lists_by_commas() -> None:
    options = parse(["workload=gpt2,mlp", "method=flat,ghost", "batch=1,2", "layers=12"])
    assert options.methods == ["none", "flat", "ghost"]
    assert [(case.workload, case.batch, case.layers) for case in cases(options)] == [
        ("gpt2", 1, 12),
        ("gpt2", 2, 12),
        ("mlp", 1, None),
        ("mlp", 2, None),
    ]
    assert parse(["batch=16"]).batches == [16]


def test_help_names_every_option_workload_and_method() -> None:
    assert all(f"  {name}=" in HELP for name in Options.__dataclass_fields__)
    assert all(name in HELP for name in [*WORKLOADS, *METHODS])


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("wrokload=mlp", "did you mean workload?"),
        ("workload=gpt", "did you mean gpt2?"),
        ("method=gohst", "did you mean ghost?"),
        ("rounds=many", "rounds does not fit"),
        ("rounds=0", "above 0"),
        ("batch=4,x", "batch=4,x"),
        ("batch=0", "at least 1"),
        ("dtype=float16", "float32"),
        ("device=tpu", "cpu or cuda"),
        ("nonsense", "key=value"),
        ("limit=-1", "above 0"),
    ],
)
def test_mistakes_are_one_sentence(argument: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        parse([argument])
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_gpu_that_is_absent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU"):
        parse(["device=cuda"])
