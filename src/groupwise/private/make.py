"""Makes a private training out of a model, an optimiser and a dataset, in one call."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from groupwise.clipping import Partition, verify
from groupwise.config.checks import validate_clipping
from groupwise.config.idle import why_idle
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError, did_you_mean
from groupwise.privacy import NoiseSource, PrivacyPlan, secret_randomness
from groupwise.privacy.mechanism import ALLOCATIONS
from groupwise.private.arguments import check_kinds, check_parameters, unknown_setting
from groupwise.private.data import check_loading, choose_examples, length_of, unpack_loader
from groupwise.private.dataset_sums import DatasetSums, Order
from groupwise.private.private import PRIVATE_MODULES, Private
from groupwise.training.from_config import make_engine, make_thresholds, plan_of
from groupwise.training.guards import optimizers_blocked
from groupwise.training.memory import choose_microbatch, halve_on_oom
from groupwise.training.microbatches import CHECKED
from groupwise.training.plain import plain
from groupwise.training.private_step import PrivateStep, agreed_noise, are_shards
from groupwise.training.ranks import Alone, Ranks

MODES: dict[str, dict[str, Any]] = {
    "flat": {"grouping": "flat", "policy": "fixed"},
    "ghost": {"grouping": "flat", "norms": "ghost", "policy": "fixed"},
    "fixed_layer": {"grouping": "layer", "policy": "fixed"},
    "fixed_block": {"grouping": "block", "policy": "fixed"},
    "adaptive_flat": {"grouping": "flat", "policy": "adaptive", "rescale": False},
    "adaptive_layer": {"grouping": "layer", "policy": "adaptive"},
    "adaptive_block": {"grouping": "block", "policy": "adaptive"},
}
"""The clipping modes of `conf/clip/` by what sets them apart; those of pipelines, and none, are for `run.py` alone."""


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
    order: Order | None = None,
    clip: str | ClipConfig | Partition = "adaptive_layer",
    threshold: float = 1.0,
    noise: str = "global",
    accountant: str = "prv",
    noise_source: NoiseSource | None = None,
    ranks: Alone | Ranks | None = None,
    **settings: Any,
) -> Private:
    """Make the training of ``model`` on ``data`` private (Algorithm 1), in a loop of your own.

    Formal guarantee: the weights and thresholds after all steps together are (ε, δ)-DP under adding or removing one
    example of ``data``, N being public, as ``private.plan`` says it, if each of the ``losses`` follows its own example
    alone. Before training a few examples are traced, and compared with a loop over single examples: a model, loss or
    collate function that mixes them there is refused by name (`groupwise.clipping.verify` says what is seen).

    Args:
        model: any that `groupwise.clipping.attach` takes; it is a plain model between steps.
        optimizer: any of ``torch.optim`` but LBFGS and SparseAdam, over the model's trainable parameters.
        data: N examples, with ``__len__`` and ``__getitem__``; or a DataLoader, whose dataset, collate function and
            workers are taken.
        losses: (model, batch) -> one loss for each of the batch's b examples, (b,): ``reduction="none"``.
        epsilon, noise_multiplier, plan: one of the three: a target ε, a noise multiplier σ, or a ready plan.
        delta: δ; by default N^-1.1.
        epochs, steps: one of the two, the length of the run; an epoch is N / batch_size steps.
        batch_size: B, what a step draws in expectation.
        microbatch: examples at once, at most; by default as many as fit into memory. Halved where memory runs out.
        collate_fn, num_workers, pin_memory: as in ``torch.utils.data.DataLoader``.
        order: the numbers of this process's examples of a batch, (n,), in the order in which they share microbatches:
            the longest texts first, say. By default as they are numbered.
        clip: a mode by its name, a partition of the model's layers (adaptive, if ``policy="fixed"`` is not given), or a
            whole configuration.
        threshold: C, the norm to which a whole gradient is clipped: each of K groups gets C/√K (adaptive ones begin
            there).
        noise: "global", "equal_budget" or "weighted": how the noise is shared out between the groups.
        accountant: "prv", "pld" or "rdp".
        noise_source: by default a fresh key of the operating system's entropy. Never use one key for two runs.
        ranks: the processes of a run with replicas (`groupwise.training.ranks.Ranks`); each calls everything at the
            same time, and draws its share. Weights and key become those of the first. Parameters may be in shards of
            all processes (``torch.distributed.fsdp.fully_shard``, before the optimiser is made), for clipping per layer
            or by ghost norms.
        **settings: other fields of `groupwise.config.schema.ClipConfig`: target_quantile, quantile_budget, rule, ….

    Raises:
        UserError: what cannot be clipped, accounted for or trained, in one sentence.
    """
    _check_optimizer(optimizer)
    check_kinds(locals())
    ranks = ranks or Alone()
    _check_model(model, ranks)
    check_parameters(model, optimizer)
    for group in optimizer.param_groups:
        group.update(plain(group))  # a learning rate of numpy's, which files do not keep
    if noise not in ALLOCATIONS:
        raise UserError(f"noise={noise!r} is unknown: choose one of {', '.join(ALLOCATIONS)}.")
    check_loading(microbatch, num_workers, collate_fn, order)
    given = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
    dataset, loading = unpack_loader(data, given)
    dataset_size = length_of(dataset)
    config = resolve_clip(clip, threshold, settings)
    sharded = are_shards(model.parameters())
    with ExitStack() as undo:
        if sharded:
            from groupwise.training.shards import reshard, use_shards

            undo.callback(use_shards(model, ranks))
        partition = None if isinstance(clip, str | ClipConfig) else clip
        engine = make_engine(model, config, sharded, partition=partition)
        assert engine is not None
        undo.callback(engine.detach)
        made = resolve_plan(
            config,
            dataset_size,
            len(engine.groups),
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            plan=plan,
            delta=delta,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            accountant=accountant,
        )
        if not made.noise_multiplier:
            warnings.warn("noise_multiplier=0 adds no noise, so nothing is private: epsilon is infinite.", stacklevel=2)
        source = noise_source or NoiseSource.fresh()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        device = trainable[0].device
        sums = DatasetSums(model, dataset, losses, loading, order, microbatch or 1)
        with secret_randomness(source.child("trace"), 0, device=device), optimizers_blocked(trainable):
            rows = choose_examples(dataset, dataset_size)
            losses_of = sums.losses_of(rows)
            if microbatch is None:
                fits = choose_microbatch(losses_of, model, device, np.array(rows), dataset_size)
                sums.size = min(ranks.gather(fits))
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
            noise=agreed_noise(source, ranks),
            allocation=noise,
            optimizer=optimizer,
            device=device,
            sums=sums,
            ranks=ranks,
        )
        return Private(core, undo.pop_all())


def resolve_clip(clip: str | ClipConfig | Partition, threshold: float, settings: Mapping[str, Any]) -> ClipConfig:
    """The clipping that is meant by a mode's name, a configuration of it, or a partition of one's own.

    Args:
        clip: as `make_private` has it. threshold: C. settings: other fields of `ClipConfig`.

    Raises:
        UserError: an unknown mode or setting, one that is out of range or changes nothing; no clipping at all.
    """
    threshold, settings = plain(threshold), plain(settings)
    given = settings if threshold == ClipConfig.threshold else {"threshold": threshold, **settings}
    if isinstance(clip, ClipConfig):
        if given:
            raise UserError("clip is a whole ClipConfig, so its settings are given twice: put them into it alone.")
        if clip.grouping == "none":
            raise UserError("clip.grouping is 'none', which is no private training: choose a mode, or train plainly.")
        config = clip
    elif isinstance(clip, str) and clip not in MODES:
        raise UserError(
            f"clip={clip!r} is no clipping mode{did_you_mean(clip, MODES)}: choose one of {', '.join(MODES)}, or give "
            "a partition."
        )
    else:
        known = {field.name for field in fields(ClipConfig)} - {"name", "threshold", "grouping", "mapping"}
        for name in settings:
            if name not in known:
                raise unknown_setting(name, (*inspect.signature(make_private).parameters, *known))
        mode = {"name": clip, **MODES[clip]} if isinstance(clip, str) else {"name": "custom", "grouping": "custom"}
        config = ClipConfig(**{"threshold": threshold, **mode, **settings})
    checked = config
    if config.grouping == "custom" and not config.mapping:  # the layers are the partition's
        one = {"grouping": "flat", "rescale": False} if config.norms == "ghost" else {"grouping": "layer"}
        checked = replace(config, **one)  # type: ignore[arg-type]
    try:
        validate_clipping(checked)
    except UserError as error:
        raise UserError(str(error).replace("clip.", "")) from error
    for name, value in given.items():
        if why := why_idle(name, config):
            raise UserError(f"{name}={value} changes nothing: {why.replace('clip.', '')}")
    return config


def resolve_plan(
    clip: ClipConfig,
    dataset_size: int,
    num_groups: int,
    *,
    epsilon: float | None,
    noise_multiplier: float | None,
    plan: PrivacyPlan | None,
    delta: float | None,
    epochs: float | None,
    steps: int | None,
    batch_size: float | None,
    accountant: str,
) -> PrivacyPlan:
    """The plan of N examples and K groups: a new one, or the given one if it fits.

    Raises:
        UserError: too few or too many of the arguments; values out of range; a plan for something else.
    """
    given = [epsilon is not None, noise_multiplier is not None, plan is not None]
    if sum(given) != 1:
        raise UserError(
            f"{sum(given)} of epsilon, noise_multiplier and plan were given: give exactly one of the three."
        )
    if plan is not None:
        if any(value is not None for value in (delta, epochs, steps, batch_size)):
            raise UserError(
                "plan says delta, steps and batch_size already: leave delta, epochs, steps, batch_size out."
            )
        _check_plan(plan, dataset_size, num_groups, adaptive=clip.policy == "adaptive")
        return plan
    if batch_size is None:
        raise UserError("batch_size is missing: give the number of examples that a step draws in expectation.")
    if (epochs is None) == (steps is None):
        how = "neither" if steps is None else "both"
        raise UserError(f"{how} of epochs and steps was given: give one, as epsilon depends on the number of steps.")
    if not 0 < batch_size <= dataset_size:
        raise UserError(f"batch_size={batch_size} for {dataset_size} examples: give a number above 0, at most as many.")
    if steps is None and not 0 < epochs < math.inf:  # type: ignore[operator]  # one of the two was given
        raise UserError(f"epochs={epochs} is no length of a run: give a finite number above 0.")
    return plan_of(
        clip,
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        num_groups=num_groups,
        accountant=accountant,
    )


def _check_plan(plan: PrivacyPlan, dataset_size: int, num_groups: int, adaptive: bool) -> None:
    """Refuse a plan whose noise is that of other data, groups or releases."""
    if plan.sampling != "poisson":
        raise UserError(
            f"the plan is for sampling={plan.sampling!r}, which guarantees nothing: make one for 'poisson'."
        )
    for name, planned, there in (
        ("dataset_size", plan.dataset_size, dataset_size),
        ("num_groups", plan.num_groups, num_groups),
    ):
        if planned != there:
            raise UserError(f"the plan is for {name}={planned}, and here it is {there}: make a plan for this run.")
    if (plan.quantile_budget > 0) != adaptive:
        raise UserError(
            f"the plan has quantile_budget={plan.quantile_budget:g}, which does not go with "
            f"{'adaptive' if adaptive else 'fixed'} thresholds: they need {'some of the budget' if adaptive else '0'}."
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        raise UserError(
            f"The optimizer is wrapped in {type(optimizer).__name__}, which may step by itself: give the one inside, "
            "optimizer.optimizer."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("LBFGS evaluates the losses several times a step, and each would be a release: use another.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError("SparseAdam takes sparse gradients alone, and clipped ones are dense: use Adam.")


def _check_model(model: nn.Module, ranks: Alone | Ranks) -> None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise UserError(
            f"The model is wrapped in {type(model).__name__}, which averages gradients before the noise: give "
            "model.module, and ranks=Ranks() for replicas."
        )
    if ranks.stages > 1:
        raise UserError(
            f"ranks has pipelines of {ranks.stages} stages, which run.py alone trains: use Ranks(stages=1)."
        )
    if any(module in PRIVATE_MODULES for module in model.modules()):
        raise UserError(
            "The model, or a part of it, is in a private training already, and a second would noise it twice: "
            "private.detach() ends the first."
        )
