"""Reads and checks the planner's options, `key=value`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from groupwise.errors import UserError, did_you_mean
from groupwise.planner.accelerators import ACCELERATORS, Accelerator

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
CHOICES = {
    "accelerator": tuple(ACCELERATORS),
    "dtype": ("float16", "bfloat16", "float32"),
    "attention": ("sdpa", "eager"),
}
HELP = f"""python -m groupwise.planner [key=value ...]

What a private pipeline needs on each device and how long it takes, without allocating the model.

  model=gpt3_175b     gpt3_175b, opt_66b, opt_175b, gpt2_xl, llama_7b, or a local folder with a config.json
  devices=16          stages, one device each
  accelerator=v100_32gb   {", ".join(ACCELERATORS)}
  memory=null         of a device, such as 32GB or 80GiB; null: the accelerator's own
  microbatch=null     examples in a microbatch; null: the fastest that fits
  length=200          tokens of an example, padding included (SAMSum with its instruction has 194 on average)
  places=null         tokens of an example that the loss is on; null: all
  batch=128           examples in a logical batch, one noisy update each
  examples=14732      in the training set (SAMSum)
  epochs=5
  rank=32             of the adapters (LoRA); 0 trains everything
  targets=null        ends of the names of layers that get adapters, by commas; null: peft's choice for the model
  dtype=null          float16, bfloat16 or float32, of frozen weights and activations; null: the accelerator's own
  rematerialize=true  keep only what enters each block, and compute the block again in the backward pass
  attention=sdpa      or eager, which keeps a matrix of length x length for each head

  python -m groupwise.planner model=gpt3_175b devices=16 memory=32GB microbatch=1
  python -m groupwise.planner model=opt_66b devices=8 accelerator=a100_80gb length=512"""


@dataclass
class PlanOptions:
    """The options of the command line; see `HELP`."""

    model: str = "gpt3_175b"
    devices: int = 16
    accelerator: str = "v100_32gb"
    memory: str | None = None
    microbatch: int | None = None
    length: int = 200
    places: int | None = None
    batch: int = 128
    examples: int = 14732
    epochs: float = 5.0
    rank: int = 32
    targets: str | None = None
    dtype: str | None = None
    rematerialize: bool = True
    attention: str = "sdpa"

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

    @property
    def adapted(self) -> tuple[str, ...]:
        """Ends of names of layers with adapters; empty: peft's choice."""
        return tuple(part.strip() for part in (self.targets or "").split(",") if part.strip())


def parse(arguments: Sequence[str]) -> PlanOptions:
    """Read and check the command line.

    Raises:
        UserError: an unknown key or accelerator, a value that does not fit.
    """
    known = [field.name for field in fields(PlanOptions)]
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise UserError(f"'{argument}' cannot be read as key=value; --help lists the keys.")
        if key not in known:
            raise UserError(f"there is no key {key}{did_you_mean(key, known)}; --help lists them.")
    try:
        given = OmegaConf.merge(OmegaConf.structured(PlanOptions), OmegaConf.from_cli(list(arguments)))
        options = OmegaConf.to_object(given)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key} does not fit: {str(error).splitlines()[0]}.") from None
    assert isinstance(options, PlanOptions)
    _check(options)
    return options


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


def _check(options: PlanOptions) -> None:
    for key, choices in CHOICES.items():
        value = getattr(options, key)
        if value is not None and value not in choices:
            raise UserError(f"{key}={value} is unknown{did_you_mean(value, choices)}: give {', '.join(choices)}.")
    for key in ("devices", "microbatch", "length", "places", "batch", "examples", "epochs"):
        value = getattr(options, key)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{key}={value} was given; give a number above 0.")
    if options.rank < 0:
        raise UserError(f"rank={options.rank} was given; give 0 (everything trains) or more.")
    for key, most in (("batch", "examples"), ("microbatch", "batch"), ("places", "length")):
        if (getattr(options, key) or 0) > getattr(options, most):
            limit = f"{most}={getattr(options, most)}"
            raise UserError(f"{key}={getattr(options, key)} is more than {limit}: give no more.")
    device = options.device
    if options.room <= 0:
        own = f"{device.reserved / 1e9:g} GB that a {device.name} takes for itself"
        raise UserError(f"memory={options.memory} leaves no room beside the {own}: give more.")
    if options.weights_dtype not in device.peak:
        raise UserError(
            f"dtype={options.weights_dtype} is not fast on a {device.name}: give {' or '.join(device.peak)}."
        )
