"""Options of the benchmarks: comma-separated lists, and one-sentence errors."""

from pathlib import Path

import pytest

from benchmarks import device_steps, device_table, pipeline, throughput
from benchmarks.options import read
from benchmarks.throughput import Options, cases
from groupwise.errors import UserError


def test_comma_separated_lists_are_read() -> None:
    options = read(Options, ["workload=gpt2,mlp", "method=flat,ghost", "batch=1,2", "layers=12"])
    assert options.methods == ["none", "flat", "ghost"]
    found = [(case.workload, case.batch, case.layers) for case in cases(options)]
    assert found == [("gpt2", 1, 12), ("gpt2", 2, 12), ("mlp", 1, None), ("mlp", 2, None)]
    assert read(Options, ["batch=16"]).batches == [16]


def test_cuda_without_a_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (device_steps, "device=cpu workload=all", "gpt2"),
        (device_steps, "device=cpu workload=gpt2,roberta_base", "gpt2"),
        (device_steps, "device=cpu microbatch=x", "microbatch=x"),
        (pipeline, "shape=weights_3", "did you mean weights_2?"),
    ],
)
def test_wrong_option_gives_one_sentence_and_writes_nothing(
    program, argument: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*argument.split(), f"out={tmp_path / 'out'}"]) == 2
    printed, errors = capsys.readouterr()
    assert printed == "" and errors.startswith("error: ") and words in errors and errors.count("\n") == 1
    assert not (tmp_path / "out").exists()
