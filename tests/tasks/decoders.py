"""Small decoders of six families, saved by `examples/small_decoder.py` and shared by tests."""

import runpy
from pathlib import Path

import torch

from groupwise.config.schema import DataConfig, EvalConfig, GenerateConfig, LoraConfig, ModelConfig, RunConfig

CPU = torch.device("cpu")
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "small_decoder.py"))
FAMILIES = tuple(EXAMPLE["FAMILIES"])
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def folder_of(folders: Path, family: str) -> Path:
    """The folder of a family, written once."""
    folder = folders / family
    if not folder.is_dir():
        EXAMPLE["write"](str(folder), family)
    return folder


def settings(folder: Path, task: str = "e2e", data=(), **model) -> RunConfig:
    lora = {"lora": LoraConfig(rank=2, targets=TARGETS)} if model.get("trains") == "lora" else {}
    attention = "eager" if "gemma2" in folder.name else "sdpa"
    return RunConfig(
        task=task,
        model=ModelConfig(**{"name": "hub", "source": str(folder), "attention": attention, **lora, **model}),
        data=DataConfig(**{"name": "synthetic", "train_limit": 20, "max_length": 160, **dict(data)}),
        eval=EvalConfig(generate=GenerateConfig(beams=2, max_new_tokens=6, batch_size=4, limit=3)),
    )
