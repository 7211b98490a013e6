"""Reads and checks the planner's options, `key=value`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from groupwise.errors import UserError, did_you_mean
from groupwise.planner.accelerators import ACCELERATORS, Accelerator, accelerator

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CHOICES = {
    "schedule": ("1f1b", "gpipe"),
    "balance": ("parameters", "time"),
    "dtype": ("float16", "bfloat16", "float32"),
    "attention": ("sdpa", "eager"),
}
HELP = f"""python -m groupwise.planner [key=value ...]

What a private pipeline needs on each device and how long it takes, without allocating the model.

  model=gpt3_175b     gpt3_175b, opt_66b, opt_175b, gpt2_xl, llama_7b, or a local folder with a config.json
  devices=16          stages, one device each
  accelerator=v100_32gb   {", ".join(ACCELERATORS)} (cpu: timed here, one block at a time)
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
  schedule=1f1b       or gpipe
  rematerialize=true  keep only what enters each block, and compute the block again in the backward pass
  balance=parameters  or time: what is to be even between the stages
  attention=sdpa      or eager, which keeps a matrix of length x length for each head
  cores=null          of cpu: how many processors all stages share; null: this machine's

  python -m groupwise.planner model=gpt3_175b devices=16 memory=32GB microbatch=1
  python -m groupwise.planner model=opt_66b devices=8 accelerator=a100_80gb length=512"""


@dataclass(frozen=True)
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
    schedule: str = "1f1b"
    rematerialize: bool = True
    balance: str = "parameters"
    attention: str = "sdpa"
    cores: int | None = None

    @property
    def device(self) -> Accelerator:
        """The accelerator, by its name."""
        return accelerator(self.accelerator)

    @property
    def room(self) -> float:
        """Bytes that tensors may take on a device; the stages on a CPU share its memory."""
        if self.memory is not None:
            return size("memory", self.memory) - self.device.reserved
        return (self.device.memory - self.device.reserved) / (self.devices if self.device.measured else 1)

    @property
    def weights_dtype(self) -> str:
        """torch's name of the dtype of frozen weights and activations."""
        return self.dtype or self.device.dtype

    @property
    def adapted(self) -> tuple[str, ...]:
        """Ends of names of layers with adapters; empty: peft's choice."""
        return tuple(part.strip() for part in (self.targets or "").split(",") if part.strip())


def parse(arguments: Sequence[str]) -> PlanOptions:
    """Read and check the command line.

    Raises:
        UserError: an unknown key or accelerator, a value that does not fit.
    """
    known = {field.name: str(field.type) for field in fields(PlanOptions)}
    given: dict[str, object] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"'{argument}' cannot be read as key=value; --help lists the keys.")
        if key not in known:
            raise UserError(f"there is no key {key}{did_you_mean(key, known)}; --help lists them.")
        given[key] = _value(key, text, known[key])
    if isinstance(given.get("dtype"), str):
        given["dtype"] = DTYPES.get(str(given["dtype"]), given["dtype"])
    options = PlanOptions(**given)  # type: ignore[arg-type]
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


def _value(key: str, text: str, kind: str) -> object:
    if text.lower() in ("null", "none", "") and "None" in kind:
        return None
    kind = kind.removesuffix(" | None")
    try:
        match kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case _:
                return text
    except (ValueError, KeyError):
        wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise UserError(f"{key}={text} was given; give {wanted}.") from None


def _check(options: PlanOptions) -> None:
    for key in ("devices", "microbatch", "length", "places", "batch", "examples", "epochs", "cores"):
        value = getattr(options, key)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{key}={value} was given; give a number above 0.")
    if options.rank < 0:
        raise UserError(f"rank={options.rank} was given; give 0 (everything trains) or more.")
    for key, choices in CHOICES.items():
        value = getattr(options, key)
        if value is not None and value not in choices:
            raise UserError(f"{key}={value} is unknown{did_you_mean(str(value), choices)}: give {', '.join(choices)}.")
    device = options.device
    if options.room <= 0:
        own = f"{device.reserved / 1e9:g} GB that a {device.name} takes for itself"
        raise UserError(f"memory={options.memory} leaves no room beside the {own}: give more.")
    if device.peak and options.weights_dtype not in device.peak:
        fast = " or ".join(device.peak)
        raise UserError(f"dtype={options.weights_dtype} is not fast on a {device.name}: give {fast}.")
    if options.examples < options.batch:
        raise UserError(f"batch={options.batch} is more than the {options.examples} examples: give a smaller one.")
    if options.microbatch is not None and options.microbatch > options.batch:
        raise UserError(f"microbatch={options.microbatch} is more than batch={options.batch}: give a smaller one.")
    if options.places is not None and options.places > options.length:
        raise UserError(f"places={options.places} is more than length={options.length}: give no more.")
    if options.cores is not None and not device.measured:
        raise UserError("cores is for accelerator=cpu: leave it out.")
