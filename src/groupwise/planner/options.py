"""The planner's options, and what must hold between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from groupwise.errors import UserError
from groupwise.options import option
from groupwise.planner.accelerators import ACCELERATORS, Accelerator

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass
class PlanOptions:
    """The options of the command line."""

    model: str = option("gpt3_175b", "or opt_66b, opt_175b, gpt2_xl, llama_7b, or a folder with a config.json")
    devices: int = option(16, "stages, one device each")
    accelerator: str = option("v100_32gb", f"of {', '.join(ACCELERATORS)}", among=tuple(ACCELERATORS))
    memory: str | None = option(None, "of a device, such as 32GB or 80GiB; default the accelerator's own")
    microbatch: int | None = option(None, "examples in a microbatch; default the fastest that fits")
    length: int = option(200, "tokens of an example, padding included (SAMSum's have 194 on average)")
    batch: int = option(128, "examples in a logical batch, one noisy update each")
    examples: int = option(14732, "in the training set (SAMSum)")
    epochs: float = option(5.0, "passes over the training set")
    rank: int = option(32, "of the adapters (LoRA); 0 trains everything", zero=True)
    dtype: str | None = option(
        None,
        "of frozen weights and activations; default the accelerator's own",
        among=("float16", "bfloat16", "float32"),
    )
    rematerialize: bool = option(True, "keep only what enters each block, and compute the block again going backward")

    def __post_init__(self) -> None:
        for key, most in (("batch", "examples"), ("microbatch", "batch")):
            if (getattr(self, key) or 0) > getattr(self, most):
                raise UserError(f"{key}={getattr(self, key)} is more than {most}={getattr(self, most)}: give no more.")
        device = self.device
        if self.room <= 0:
            own = f"{device.reserved / 1e9:g} GB that a {device.name} takes for itself"
            raise UserError(f"memory={self.memory} leaves no room beside the {own}: give more.")
        if self.weights_dtype not in device.peak:
            raise UserError(
                f"dtype={self.weights_dtype} is not fast on a {device.name}: give {' or '.join(device.peak)}."
            )

    @property
    def device(self) -> Accelerator:
        """The accelerator, by its name."""
        return ACCELERATORS[self.accelerator]

    @property
    def room(self) -> float:
        """Bytes that tensors may take on a device."""
        memory = self.device.memory if self.memory is None else size("memory", self.memory)
        return memory - self.device.reserved

    @property
    def weights_dtype(self) -> str:
        """torch's name of the dtype of frozen weights and activations."""
        return self.dtype or next(iter(self.device.peak))


def size(key: str, text: str) -> float:
    """Bytes from 32GB, 80GiB, 500MB or a plain number.

    Raises:
        UserError: it cannot be read, or is not above 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?I?B)?\s*", text, re.IGNORECASE)
    number = float(found[1]) * UNITS[(found[2] or "B").upper()] if found else 0.0
    if number <= 0:
        raise UserError(f"{key}={text} was given; give a size such as 32GB or 80GiB.")
    return number
