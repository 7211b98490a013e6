"""One process's steps for `benchmarks.tensor`: the model, what is foretold of it, and what is counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.messages import Messages
from groupwise.clipping import ClippingEngine, attach
from groupwise.clipping.engine import Norms
from groupwise.config.schema import RunConfig
from groupwise.planner.parts import PARTITIONS, Parts, foretell
from groupwise.privacy import NoiseSource, release_gradients
from groupwise.processes.environment import Place
from groupwise.tasks.text_task import token_losses
from groupwise.tensor.cutting import CutModel, cut
from groupwise.torchvision_import import mend_torchvision
from groupwise.training.ranks import Ranks

CLIPPINGS = ("none", "device", "layer", "block", "flat", "ghost")


@dataclass
class TensorOptions:
    """What the command line may say; see `HELP`."""

    parts: int = 2
    layers: int = 4
    width: int = 256
    words: int = 5000
    microbatch: int = 4
    microbatches: int = 2
    length: int = 64
    steps: int = 3


def model_of(options: TensorOptions) -> nn.Module:
    """The whole GPT-2, in float32, on torch's default device."""
    mend_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.width,
        n_head=max(options.parts, options.width // 64),
        n_positions=options.length,
        vocab_size=options.words,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).train()


def foretold(options: TensorOptions, clipping: str) -> Parts:
    """What the planner says of a step."""
    with torch.device("meta"):
        model = model_of(options)
    return foretell(model, options.parts, clipping, [options.microbatch] * options.microbatches, options.length)


def measured(options: TensorOptions, _: RunConfig, place: Place) -> dict[str, Any]:
    """By clipping: messages and bytes of this process in one step, and the seconds of the fastest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.meeting, rank=place.rank, world_size=place.world)
    found = {clipping: _measured(options, clipping, Ranks(parts=options.parts)) for clipping in CLIPPINGS}
    dist.destroy_process_group()
    return found


def _measured(options: TensorOptions, clipping: str, ranks: Ranks) -> dict[str, Any]:
    model = cut(model_of(options), ranks, torch.device("cpu"))
    engine = _attached(model, clipping, ranks)
    with Messages() as messages:
        _step(options, model, engine, ranks)  # proves whose rows are whose, with messages of its own
    seconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        with Messages() as messages:
            _step(options, model, engine, ranks)
        seconds.append(time.perf_counter() - began)
    return {"messages": messages.count, "bytes": messages.bytes, "seconds": min(seconds)}


def _attached(model: CutModel, clipping: str, ranks: Ranks) -> ClippingEngine | None:
    if clipping == "none":
        return None
    add_up = None if clipping == "device" else ranks.add_parts_
    partition = PARTITIONS["flat" if clipping == "device" else clipping](model.model)
    norms: Norms = "ghost" if clipping == "ghost" else "bookkeeping"
    return attach(model.model, partition, 1.0, norms=norms, parts=model.parts(add_up))


def _step(options: TensorOptions, model: CutModel, engine: ClippingEngine | None, ranks: Ranks) -> None:
    """Sums of all microbatches, their noise, and what all processes take from the first."""
    for parameter in model.model.parameters():
        parameter.grad = None
    if engine is not None:
        engine.reset()
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.microbatches):
        tokens = torch.randint(options.words, (options.microbatch, options.length), generator=generator)
        logits = model.model(input_ids=tokens).logits
        losses = token_losses(logits[:, :-1], tokens[:, 1:]).sum(1)
        losses.sum().backward() if engine is None else engine.backward(losses)
    copied = [model.model.get_parameter(name).grad for name in model.copied]
    counts = []
    if engine is not None:
        release_gradients(
            engine.sensitivity("add_remove"),
            allocation="equal_budget" if _is_apart(engine) else "global",
            noise_multiplier=1.0,
            expected_batch_size=8.0,
            noise=NoiseSource.from_seed(0).child(f"part {ranks.part}"),
            step=0,
        )
        counts = [] if _is_apart(engine) else [engine.counts]
    ranks.copy_parts_([*(gradient for gradient in copied if gradient is not None), *counts])


def _is_apart(engine: ClippingEngine) -> bool:
    """Whether each process's share is a group of its own."""
    return engine.parts is not None and engine.parts.add_up is None
