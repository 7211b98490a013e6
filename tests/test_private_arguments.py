"""Invalid arguments of `make_private` are refused in one sentence."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from groupwise.clipping import per_layer
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError
from groupwise.privacy import make_plan
from tests.private_use import BATCH, DATA, EXAMPLES, Misuse, Use, X, Y, network, refuses


def make(**options: Any) -> None:
    Use(**{name: None if value == "none" else value for name, value in options.items()})


def plan(**options: Any) -> Any:
    given = {"dataset_size": EXAMPLES, "expected_batch_size": BATCH, "steps": 3, "num_groups": 2, "delta": 1e-3}
    return make_plan(**{**given, "noise_multiplier": 1.0, "quantile_budget": 0.01, "accountant": "rdp", **options})


def with_plan(plan: Any, **options: Any) -> None:
    Use(**{"plan": plan, "noise_multiplier": None, "steps": None, "batch_size": None, "delta": None, **options})


def foreign_parameters() -> None:
    model = network()
    everything = [*model.parameters(), nn.Parameter(torch.zeros(3))]
    make(model=model, optimizer=torch.optim.SGD(everything, lr=1.0))


def missing_in_the_optimizer() -> None:
    model = network()
    make(model=model, optimizer=torch.optim.SGD(model[0].parameters(), lr=1.0))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(DATA)


ARGUMENTS: dict[str, Misuse] = {
    "none of epsilon, noise_multiplier and plan": (lambda: make(noise_multiplier="none"), "0 of epsilon"),
    "two of epsilon, noise_multiplier and plan": (lambda: make(epsilon=1.0), "2 of epsilon"),
    "neither epochs nor steps": (lambda: make(steps="none"), "Neither epochs nor steps"),
    "both epochs and steps": (lambda: make(epochs=1), "Both epochs and steps"),
    "an invalid number of epochs": (lambda: make(steps="none", epochs=-1), "epochs=-1"),
    "no batch_size, or one out of range": (lambda: make(batch_size=EXAMPLES + 1), "batch_size=41"),
    "epsilon out of range": (lambda: make(noise_multiplier="none", epsilon=-1.0), "epsilon is -1"),
    "a threshold out of range": (lambda: make(threshold=-1.0), "threshold=-1.0 must be greater"),
    "a quantile out of range": (lambda: make(target_quantile=1.5), "target_quantile=1.5 must"),
    "a misspelt policy, rule or norm method": (lambda: make(policy="Adaptive"), "policy=Adaptive is not one of"),
    "a setting that has no effect": (lambda: make(clip="flat", target_quantile=0.5), "target_quantile=0.5 changes not"),
    "a threshold that has no effect": (
        lambda: make(clip="adaptive_flat", initial_threshold=0.5, threshold=3.0),
        r"threshold=3.0 changes nothing: .* initial_threshold=0.5 .* \(rescale=false\)",
    ),
    "a misspelling in a whole `ClipConfig`": (lambda: make(clip=ClipConfig(policy="quantile")), "policy=quantile is"),
    "one adaptive threshold with rescaling": (lambda: make(clip="flat", policy="adaptive"), "rescales the only"),
    "no budget for the counts of adaptive thresholds": (lambda: make(quantile_budget=0.0), "quantile_budget=0"),
    'an unknown mode, or `clip="none"`': (
        lambda: make(clip="adaptive_layers"),
        "not a clipping mode .did you mean adaptive_layer",
    ),
    "an unknown setting": (lambda: make(target_quantle=0.5), "did you mean target_quantile"),
    "an unknown allocation of the noise": (lambda: make(noise="local"), "noise='local'"),
    "a partition that misses a layer": (lambda: make(clip=per_layer(network())[:1]), "group"),
    "a plan of shuffled batches": (lambda: with_plan(plan(sampling="shuffle")), "guarantees nothing"),
    "a plan of other data or groups": (lambda: with_plan(plan(num_groups=3)), "num_groups=3"),
    "a plan without a budget for the counts of adaptive thresholds": (
        lambda: with_plan(plan(quantile_budget=0.0)),
        "thresholds need",
    ),
    "a plan whose epsilon does not match its noise": (
        lambda: with_plan(replace(plan(), epsilon=0.1)),
        "The plan states epsilon=0.1, but its noise gives",
    ),
    "a threshold too small for float32": (lambda: make(threshold=1e-31), "at least 1e-30, as float32 rounds"),
    "a plan, and steps or delta beside it": (lambda: with_plan(plan(), steps=3), "plan sets"),
    "data without a length": (lambda: make(data=Stream()), "without __len__"),
    "BatchNorm": (lambda: make(model=network(nn.BatchNorm1d(8))), "BatchNorm"),
    "DataParallel or DistributedDataParallel": (lambda: make(model=nn.DataParallel(network())), "DataParallel"),
    "columns of examples in place of a dataset": (lambda: make(data=(X, Y)), r"TensorDataset\(x, y\)"),
    "arguments in another order": (lambda: make(optimizer=[(X, Y)]), r"was given \(Sequential, list, …\)"),
    "what `fix_model` returns in place of the model": (
        lambda: make(model=["a sentence"], optimizer=torch.optim.SGD([X], 1.0)),
        r"was given \(list, SGD, …\)",
    ),
    "losses without a model and a batch": (lambda: make(losses=nn.CrossEntropyLoss()), "does not take .model, batch"),
    "parameters in the optimizer that are not the model's": (foreign_parameters, "not the model's"),
    "trainable parameters that are not in the optimizer": (missing_in_the_optimizer, "not in the optimizer"),
    "an optimizer that needs a closure, or sparse gradients": (
        lambda: make(optimizer=torch.optim.LBFGS(network().parameters())),
        "LBFGS does not work with private steps",
    ),
    "a microbatch without examples": (lambda: make(microbatch=-1), "microbatch=-1 must be a whole number of at least"),
    "half a worker": (lambda: make(num_workers=0.5), "num_workers=0.5 must be a whole number of at least 0"),
    "an invalid noise source": (lambda: make(noise_source=0), "noise_source is 0: give a groupwise"),
    "a negative number of steps": (lambda: Use().private.steps(-1), "count=-1 must be a whole number"),
    "`make_private` twice on one model": (lambda: make(model=Use().model), "already"),
    "`make_private` on a model with a private part": (
        lambda: make(model=nn.Sequential(Use().model, nn.Linear(2, 2))),
        "already",
    ),
}


@pytest.mark.parametrize("misuse", ARGUMENTS, ids=lambda name: name.replace("`", ""))
def test_invalid_arguments_are_refused_in_one_sentence(misuse):
    refuses(*ARGUMENTS[misuse])


def test_a_dict_of_numbered_examples_is_a_dataset():
    Use(data=dict(enumerate(zip(X, Y, strict=True)))).train(1)


def test_a_pandas_table_is_refused_with_advice_to_make_a_tensor_dataset():
    import pandas as pd

    table = pd.DataFrame({"a": [0.0, 1.0, 2.0], "b": [0, 1, 0]})
    for data in (table, (table[["a"]], table["b"]), (table.to_numpy(), table["b"])):
        with pytest.raises(UserError, match=r"of columns, not of examples: give torch.utils.data.TensorDataset"):
            Use(data=data)
