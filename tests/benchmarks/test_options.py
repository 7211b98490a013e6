"""Options: lists by commas, and one sentence for a mistake."""

from pathlib import Path

import pytest

from benchmarks import device_table, pipeline, throughput
from benchmarks.options import read
from benchmarks.throughput import Options, cases
from groupwise.errors import UserError


def test_lists_by_commas() -> None:
    options = read(Options, ["workload=gpt2,mlp", "method=flat,ghost", "batch=1,2", "layers=12"])
    assert options.methods == ["none", "flat", "ghost"]
    assert [(case.workload, case.batch, case.layers) for case in cases(options)] == [
        ("gpt2", 1, 12),
        ("gpt2", 2, 12),
        ("mlp", 1, None),
        ("mlp", 2, None),
    ]
    assert read(Options, ["batch=16"]).batches == [16]


def test_a_gpu_that_is_absent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU"):
        read(Options, ["device=cuda"])


@pytest.mark.parametrize(
    ("program", "argument", "words"),
    [
        (throughput, "workload=gpt", "did you mean gpt2?"),
        (throughput, "method=gohst", "did you mean ghost?"),
        (throughput, "batch=4,x", "batch=4,x"),
        (throughput, "dtype=float16", "float32"),
        (throughput, "device=tpu", "cpu, cuda"),
        (device_table, "device=cpu workload=gtp2", "did you mean gpt2?"),
        (pipeline, "shape=weights_3", "did you mean weights_2?"),
    ],
)
def test_a_mistake_is_one_sentence_exit_code_2_and_nothing_written(
    program, argument: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*argument.split(), f"out={tmp_path / 'out'}"]) == 2
    printed, told = capsys.readouterr()
    assert printed == "" and told.startswith("error: ") and words in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()
