"""Makes a private training from a model, an optimiser and a dataset."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.clipping import Partition, verify
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError, warn
from groupwise.privacy import NoiseSource, PrivacyPlan, secret_randomness
from groupwise.privacy.mechanism import ALLOCATIONS
from groupwise.private.arguments import (
    check_fresh,
    check_model,
    check_parameters,
    knows_names,
)
from groupwise.private.data import check_items, choose_examples, length_of, unpack_loader
from groupwise.private.dataset_sums import DatasetSums
from groupwise.private.private import Private
from groupwise.private.settings import resolve_clip, resolve_plan
from groupwise.training.from_config import make_engine, make_thresholds
from groupwise.training.graphs import Graphs, recorder_of
from groupwise.training.guards import unfitted
from groupwise.training.memory import choose_microbatch, fill_evenly, halve_on_oom
from groupwise.training.microbatches import CHECKED
from groupwise.training.private_step import PrivateStep, are_shards
from groupwise.training.ranks import Ranks


@knows_names
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    losses: Callable[[nn.Module, Any], Tensor],
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    plan: PrivacyPlan | None = None,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: float | None = None,
    microbatch: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    clip: str | ClipConfig | Partition = "adaptive_layer",
    threshold: float = 1.0,
    noise: str = "global",
    accountant: str = "prv",
    cuda_graph: bool = False,
    noise_source: NoiseSource | None = None,
    ranks: Ranks | None = None,
    **settings: Any,
) -> Private:
    """Make the training of ``model`` on ``data`` private (Algorithm 1), in a loop of your own.

    Formal guarantee: the weights and thresholds after all steps, taken together, are (ε, δ)-DP under adding or removing
    one example of ``data``, with N public and with the ε and δ of ``private.plan``, if each of the ``losses`` depends
    on its own example alone.

    Before training a few examples are traced, and compared with a loop over single examples. A model, loss or collate
    function that mixes these examples raises an error that names it (see `groupwise.clipping.verify`).

    Args:
        model: any that `groupwise.clipping.attach` takes; it is a plain model between steps.
        optimizer: any of ``torch.optim`` but LBFGS and SparseAdam, over the model's trainable parameters.
        data: N examples, with ``__len__`` and ``__getitem__``; or a DataLoader, whose dataset, collate function and
            workers are used.
        losses: (model, batch) -> one loss for each of the batch's b examples, (b,): ``reduction="none"``.
        epsilon, noise_multiplier, plan: one of the three: a target ε, a noise multiplier σ, or a plan.
        delta: δ; by default N^-1.1.
        epochs, steps: one of the two, the length of the run; an epoch is N / batch_size steps.
        batch_size: B, the expected number of examples that a step draws.
        microbatch: the most examples at once; by default as many as fit into memory. Halved if memory runs out.
        collate_fn, num_workers, pin_memory: as in ``torch.utils.data.DataLoader``.
        clip: the name of a mode, a partition of the model's layers (adaptive, unless ``policy="fixed"`` is given), or a
            `ClipConfig`.
        threshold: C, the norm to which a whole gradient is clipped: each of K groups gets C/√K (adaptive ones begin
            there).
        noise: "global", "equal_budget" or "weighted": how the noise is allocated to the groups.
        accountant: "prv", "pld" or "rdp".
        cuda_graph: on an NVIDIA GPU, launch a microbatch as one CUDA graph: faster where the host is the bottleneck, as
            with transformers in bfloat16. The batch is moved to the model's device; there should be few shapes.
        noise_source: by default a fresh key of the operating system's entropy. Never use one key for two runs.
        ranks: the processes of the run, by default those of ``torch.distributed``; each calls everything at the same
            time, and draws its share. Weights and key become those of the first. Parameters may be in shards of
            all processes (``torch.distributed.fsdp.fully_shard``, before the optimiser is made), for clipping per layer
            or by ghost norms.
        **settings: other fields of `groupwise.config.schema.ClipConfig`: target_quantile, quantile_budget, rule, ….

    Raises:
        UserError: the model, data or arguments cannot be clipped, accounted for or trained; says what to do.
    """
    if isinstance(losses, nn.Module):
        raise UserError(
            f"losses is a {type(losses).__name__}, which does not take (model, batch): write losses(model, batch), "
            "where batch is what the collate function makes, and return one loss per example."
        )
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "param_groups"):
        kinds = f"{type(model).__name__}, {type(optimizer).__name__}"
        raise UserError(f"make_private takes (model, optimizer, data, losses), but was given ({kinds}, …).")
    check_model(model)
    check_parameters(model, optimizer)
    check_fresh(optimizer)
    if noise not in ALLOCATIONS:
        raise UserError(f"noise={noise!r} is unknown: choose one of {', '.join(ALLOCATIONS)}.")
    given = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
    dataset, reading = unpack_loader(data, given)
    dataset_size = length_of(dataset)
    if not model.training:
        warn(
            "The model is in eval mode, and every step will run it so, without dropout and with BatchNorm's statistics "
            "fixed: call model.train() first if that is not intended."
        )
    config = resolve_clip(clip, threshold, settings)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = next((parameter.device for parameter in trainable), torch.device("cpu"))
    ranks = ranks or Ranks(device=device)
    sharded = are_shards(model.parameters())
    with ExitStack() as undo:
        if sharded:
            from groupwise.training.shards import reshard, sum_gradients, use_shards

            use_shards(model, ranks)
            undo.callback(sum_gradients, model, average=True)
        partition = None if isinstance(clip, str | ClipConfig) else clip
        engine = make_engine(model, config, sharded, partition=partition)
        assert engine is not None
        undo.callback(engine.detach)
        budget = {"epsilon": epsilon, "noise_multiplier": noise_multiplier}
        length = {"delta": delta, "epochs": epochs, "steps": steps, "batch_size": batch_size}
        made = resolve_plan(config, dataset_size, len(engine.groups), plan, accountant, budget, length)
        if not made.noise_multiplier:
            warn("noise_multiplier=0 adds no noise, so nothing is private: epsilon is infinite.")
        source = noise_source or NoiseSource.fresh()
        if cuda_graph and sharded:
            raise UserError("cuda_graph=True is not for parameters in shards: leave it out.")
        graphs = Graphs(recorder_of(device), model) if cuda_graph else None
        sums = DatasetSums(model, dataset, losses, microbatch or 1, graphs, **reading)
        quiet = secret_randomness(source.child("trace"), 0, device=device)
        with quiet, unfitted(model):
            rows = choose_examples(dataset, dataset_size)
            check_items(sums.items, rows)
            losses_of = sums.losses_of(rows, now=True)  # read here: draws of the dataset are not draws of the losses
            if microbatch is None:
                fits = choose_microbatch(losses_of, model, device, np.array(rows), dataset_size)
                sums.size = fill_evenly(min(ranks.gather(fits)), made.expected_batch_size / ranks.replicas)
            if sharded:  # single examples need a whole model
                engine.trace(losses_of, rows)
            else:
                check = partial(verify, engine, losses_of, rows[:CHECKED])
                halve_on_oom(sums.size, lambda most: check(most=most), "checking", alone=True)
        if sharded:
            reshard(model)  # the trace left the outermost parameters whole
        ranks.copy_([tensor for tensor in (*model.parameters(), *model.buffers()) if not hasattr(tensor, "to_local")])
        core = PrivateStep(
            model=model,
            engine=engine,
            thresholds=make_thresholds(config, made),
            plan=made,
            noise=NoiseSource.from_state(ranks.broadcast(source.state_dict())),
            allocation=noise,
            optimizer=optimizer,
            device=device,
            sums=sums,
            ranks=ranks,
        )
        return Private(core, undo.pop_all(), {**asdict(config), "noise": noise})
