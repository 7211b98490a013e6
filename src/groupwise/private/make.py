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
from groupwise.clipping.unchanged import moved_parameters
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError, warn
from groupwise.privacy import NoiseSource, PrivacyPlan, secret_randomness
from groupwise.privacy.mechanism import ALLOCATIONS
from groupwise.private.arguments import check_count, check_optimizer, knows_names, trainings_of
from groupwise.private.data import check_items, choose_examples, length_of, unpack_loader
from groupwise.private.dataset_sums import DatasetSums
from groupwise.private.private import Private
from groupwise.private.settings import resolve_clip, resolve_plan
from groupwise.training.from_config import make_engine, make_thresholds
from groupwise.training.graphs import Graphs, recorder_of
from groupwise.training.guards import unfitted
from groupwise.training.memory import choose_microbatch, fill_evenly, halve_on_oom
from groupwise.training.private_step import PrivateStep
from groupwise.training.ranks import Ranks
from groupwise.training.shards import are_shards, reshard, sum_gradients, use_shards


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
    only on its own example.

    Before training, a few examples are traced and compared with a loop over single examples. If the model, the loss or
    the collate function mixes these examples, the error says where (see `groupwise.clipping.verify`).

    Args:
        model: any model that `groupwise.clipping.attach` supports. Between steps it is a plain model.
        optimizer: any of ``torch.optim`` but LBFGS and SparseAdam, for the model's trainable parameters.
        data: N examples, with ``__len__`` and ``__getitem__``, or a DataLoader, whose dataset, collate function and
            workers are used.
        losses: a function of (model, batch) that returns one loss for each of the batch's b examples, (b,), as losses
            with ``reduction="none"`` do.
        epsilon: the target ε. Give one of epsilon, noise_multiplier and plan.
        noise_multiplier: σ, the standard deviation of the noise relative to the sensitivity.
        plan: a plan of `groupwise.privacy.make_plan`, instead of epsilon, delta, steps and batch_size.
        delta: δ; by default N^-1.1.
        epochs: the length of the run in epochs of N / batch_size steps. Give one of epochs and steps.
        steps: the length of the run in steps.
        batch_size: B, the expected number of examples of a step.
        microbatch: the largest number of examples at once; by default as many as fit into memory. It is halved if
            memory runs out.
        collate_fn, num_workers, pin_memory: see ``torch.utils.data.DataLoader``.
        clip: the name of a clipping mode, a `ClipConfig`, or a partition of the model's layers, whose thresholds are
            adaptive unless ``policy="fixed"`` is given.
        threshold: C, the norm to which the whole gradient of an example is clipped. Each of K groups gets C/√K, which
            is where adaptive thresholds start.
        noise: how the noise is allocated to the groups: "global", "equal_budget" or "weighted".
        accountant: "prv", "pld" or "rdp".
        cuda_graph: whether to launch a microbatch as one CUDA graph, on an NVIDIA GPU. This is faster if the host is
            the bottleneck, as with transformers in bfloat16. Batches are moved to the GPU, and should have few shapes.
        noise_source: the source of all randomness; by default a new secret key. Never use one key for two runs.
        ranks: the processes of the run; by default those of ``torch.distributed``. Each makes the same calls, and
            computes its share of a batch. They use the first one's weights and key. With clipping per layer or ghost
            norms, parameters may be sharded over all processes (``fully_shard``, before the optimiser is made).
        **settings: other fields of `groupwise.config.schema.ClipConfig`: target_quantile, quantile_budget, rule, ….

    Raises:
        UserError: the model, data or arguments cannot be used. The message says what to do.
    """
    if isinstance(losses, nn.Module):
        raise UserError(
            f"losses is a {type(losses).__name__}, which does not take (model, batch): write a function losses(model, "
            "batch), where batch comes from the collate function, that returns one loss for each example."
        )
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "param_groups"):
        kinds = f"{type(model).__name__}, {type(optimizer).__name__}"
        raise UserError(
            f"make_private takes (model, optimizer, data, losses), but was given ({kinds}, …): give one optimizer, of "
            "a class of your own if it should step several, whose param_groups and state include theirs."
        )
    check_count("microbatch", microbatch, 1)
    check_count("num_workers", num_workers, 0)
    if not isinstance(noise_source, NoiseSource | None):
        raise UserError(f"noise_source is {noise_source!r}: give a groupwise.privacy.NoiseSource, or leave it out.")
    if trainings_of(model):
        raise UserError(
            "The model, or a part of it, is already in a private training: end that training first, with "
            "private.detach() or groupwise.detach(model)."
        )
    reshard(model)  # after a forward pass
    check_optimizer(model, optimizer)
    if noise not in ALLOCATIONS:
        raise UserError(f"noise={noise!r} is unknown: choose one of {', '.join(ALLOCATIONS)}.")
    dataset, reading = unpack_loader(data, collate_fn=collate_fn, num_workers=num_workers, pin_memory=pin_memory)
    dataset_size = length_of(dataset)
    if not model.training:
        warn(
            "The model is in eval mode, and all steps will run it in this mode, without dropout and with fixed "
            "BatchNorm statistics: call model.train() first if that is not intended."
        )
    config = resolve_clip(clip, threshold, settings)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = next((parameter.device for parameter in trainable), torch.device("cpu"))
    ranks = ranks or Ranks(device=device)
    sharded = are_shards(model.parameters())
    with ExitStack() as undo:
        if sharded:
            use_shards(model, ranks)
            undo.callback(reshard, model)  # also where the trace failed
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
        source = NoiseSource.from_state(ranks.broadcast((noise_source or NoiseSource.fresh()).state_dict()))
        if cuda_graph and sharded:
            raise UserError("cuda_graph=True does not work with sharded parameters: leave it out.")
        graphs = Graphs(recorder_of(device), model) if cuda_graph else None
        sums = DatasetSums(model, dataset, losses, microbatch or 1, graphs, **reading)
        quiet = secret_randomness(source.child("trace"), 0, device=device)
        with quiet, unfitted(model):
            rows = choose_examples(dataset, dataset_size)
            check_items(dataset, rows)
            losses_of = sums.losses_of(rows, now=True)  # now, so that random augmentation does not look like dropout
            if microbatch is None:
                fits = choose_microbatch(losses_of, model, device, np.array(rows), dataset_size)
                sums.size = fill_evenly(min(ranks.gather(fits)), made.expected_batch_size / ranks.replicas)
            if sharded:  # the check by single examples needs unsharded parameters
                reshard(model)
                with moved_parameters(model, ranks.replica):
                    engine.trace(losses_of, rows)
                    reshard(model)
            else:
                check = partial(verify, engine, losses_of, rows)
                most = max(sums.size, len(rows))
                halve_on_oom(most, lambda most: check(most=most, rows=max(2, most)), "checking", alone=True)
        ranks.copy_([tensor for tensor in (*model.parameters(), *model.buffers()) if not hasattr(tensor, "to_local")])
        core = PrivateStep(
            model=model,
            engine=engine,
            thresholds=make_thresholds(config, made),
            plan=made,
            noise=source,
            allocation=noise,
            optimizer=optimizer,
            device=device,
            sums=sums,
            ranks=ranks,
        )
        fixed = {
            **asdict(config),
            "noise": noise,
            "optimizer": type(optimizer).__name__,
            "trainable": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
            "groups": [[group.name, *group.layers] for group in engine.partition],
            "training_mode": [name for name, module in model.named_modules() if module.training],
        }
        return Private(core, undo.pop_all(), fixed)
