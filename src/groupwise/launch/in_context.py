"""In-context learning: no training, only generation from a prompt that shows training examples (Table 6)."""

import time
from typing import Any

import torch

from groupwise.config import RunConfig
from groupwise.training.provenance import resources
from groupwise.training.record import RunRecord
from groupwise.training.task import Task


def evaluate_in_context(config: RunConfig, record: RunRecord, task: Task, device: torch.device) -> dict[str, Any]:
    """Evaluate the model as it was loaded, `eval.shots` examples in the prompt; writes a record and returns its row."""
    assert config.eval.shots is not None
    shots, prompt_set = config.eval.shots, config.eval.prompt_set
    print(f"In context: {shots} training examples in the prompt (set {prompt_set}), no training.")
    if shots:
        print("  NOT PRIVATE: the prompt shows training examples as they are.")
    began = time.monotonic()
    found = task.evaluate_in_context(shots, prompt_set)
    seconds = time.monotonic() - began
    metrics = {f"test/{key}": value for key, value in found.items()}
    record.begin()
    try:
        record.write_data(task.describe_data())
        record.write_outputs(task.outputs())
        row = record.finish(metrics, plan={"steps": 0, "private": False}, system=resources(device, seconds))
    finally:
        record.close()
    told = "  ".join(f"{key} {value:.2f}" for key, value in metrics.items())
    print(f"{told}  in {seconds:.0f} s\nRecord: {record.folder}")
    return row
