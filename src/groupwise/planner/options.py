"""The planner's options, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.errors import UserError
from groupwise.options import option
from groupwise.planner.accelerators import ACCELERATORS, Accelerator


@dataclass
class PlanOptions:
    """The options of the command line."""

    model: str = option("gpt3_175b", "or opt_66b, opt_175b, gpt2_xl, llama_7b, or a folder with a config.json")
    devices: int = option(16, "stages, one device each")
    accelerator: str = option("v100_32gb", f"of {', '.join(ACCELERATORS)}", among=tuple(ACCELERATORS))
    memory: float | None = option(None, "GB of a device, 1e9 bytes each; default the accelerator's own")
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
            raise UserError(f"memory={self.memory:g} leaves no room beside the {own}: give more.")
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
        memory = self.device.memory if self.memory is None else 1e9 * self.memory
        return memory - self.device.reserved

    @property
    def weights_dtype(self) -> str:
        """torch's name of the dtype of frozen weights and activations."""
        return self.dtype or next(iter(self.device.peak))
