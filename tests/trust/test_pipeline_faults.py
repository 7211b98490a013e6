"""A pipeline whose checkpoint lost one stage's file goes on from the one before it, on all stages."""

import signal

import pytest
import torch

from tests.runs.test_pipeline_runs import LONG, folder_of, start, wait_for_steps, weights
from tests.waiting import PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize("harmed", ["stage-1.pt", "checkpoint.pt"])
def test_it_ends_with_the_same_bits(tmp_path, harmed):
    whole = start(tmp_path / "whole", *LONG)
    whole.communicate(timeout=PATIENCE)
    results = tmp_path / "broken"
    killed = start(results, *LONG)
    wait_for_steps(results, 3)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=PATIENCE)
    folder = folder_of(results)
    newest = folder / torch.load(folder / "checkpoint.pt")["folder"] if harmed == "stage-1.pt" else folder
    content = bytearray((newest / harmed).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / harmed).write_bytes(content)
    resumed = start(results, *LONG)
    _, told = resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0, told
    assert told.count("warning: ") == 1 and "resuming from the one before it" in told
    one, other = weights(tmp_path / "whole"), weights(results)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not list(folder.glob("checkpoint*"))
