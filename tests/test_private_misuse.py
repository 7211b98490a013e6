"""Ways to hold `make_private` wrong, by name, are refused in a sentence; docs/sharp_edges.md says how many."""

import copy
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from groupwise import make_private
from groupwise.clipping import per_layer
from groupwise.config.schema import ClipConfig
from groupwise.errors import UserError
from groupwise.privacy import make_plan
from groupwise.training.ranks import Alone
from tests.private_use import BATCH, DATA, EXAMPLES, MICROBATCH, Use, X, Y, network, other_model, well


def make(**options: Any) -> None:
    Use(**{name: None if value == "none" else value for name, value in options.items()})


def in_the_loop(do: Callable[[Use, Tensor, Tensor], object], **options: Any) -> None:
    """Train as one should, and do something else as well before every `step`."""
    use = Use(**options)
    for x, y in use.private.batches(MICROBATCH):
        do(use, x, y)
        use.private.step()


def then(do: Callable[[Use], object]) -> Callable[[Use, Tensor, Tensor], None]:
    def both(use: Use, x: Tensor, y: Tensor) -> None:
        well(use, x, y)
        do(use)

    return both


def plan(**options: Any) -> Any:
    given = {"dataset_size": EXAMPLES, "expected_batch_size": BATCH, "steps": 3, "num_groups": 2, "delta": 1e-3}
    return make_plan(**{**given, "noise_multiplier": 1.0, "quantile_budget": 0.01, "accountant": "rdp", **options})


def with_plan(made: Any, **options: Any) -> None:
    Use(**{"plan": made, "noise_multiplier": None, "steps": None, "batch_size": None, "delta": None, **options})


def past_the_engine(use: Use, x: Tensor, y: Tensor) -> None:
    use.losses(x, y).sum().backward()


def penalty(use: Use) -> None:
    sum(p.square().sum() for p in use.model.parameters()).backward()


def no_backward() -> None:
    use = Use()
    for _ in use.private.batches(MICROBATCH):
        pass


def no_step() -> None:
    use = Use()
    for x, y in use.private.batches(MICROBATCH):
        well(use, x, y)


def step_outside() -> None:
    use = Use()
    for x, y in use.private.batches(MICROBATCH):
        well(use, x, y)
        break
    use.private.step()


def two_loops() -> None:
    use = Use()
    first = use.private.batches(MICROBATCH)
    next(first)
    next(use.private.batches(MICROBATCH))
    next(first)


def two_trainings() -> None:
    one, two = Use(), Use(seed=4)
    for (x, y), _ in zip(one.private.batches(MICROBATCH), two.private.batches(MICROBATCH), strict=False):
        well(one, x, y)


def seeded(use: Use, x: Tensor, y: Tensor) -> None:
    torch.manual_seed(0)
    well(use, x, y)


def in_a_fork() -> None:
    use = Use()
    told, tell = os.pipe()
    if os.fork() == 0:
        try:
            use.private.batches()
        except UserError as error:
            os.write(tell, str(error).encode())
        os._exit(0)
    os.wait()
    os.close(tell)
    raise UserError(os.read(told, 1000).decode())


def freeze(use: Use) -> None:
    use.model[0].weight.requires_grad_(False)


def add(use: Use) -> None:
    use.model[0].extra = nn.Parameter(torch.zeros(1))


def more_in_the_optimizer(use: Use) -> None:
    use.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def closed() -> None:
    use = Use().train(1)
    use.private.detach()
    use.train()


def frozen_later() -> None:
    use = Use().train(1)
    freeze(use)
    use.train()


def added_later() -> None:
    use = Use().train(1)
    add(use)
    use.train()


def other_state() -> None:
    Use().private.load_state_dict(Use(steps=4).private.state_dict())


def no_state() -> None:
    use = Use()
    use.private.load_state_dict(use.model.state_dict())


def back_in_time() -> None:
    use = Use()
    state = copy.deepcopy(use.private.state_dict())
    use.train(1).private.load_state_dict(state)


def grown() -> None:
    data = [(x, y) for x, y in zip(X, Y, strict=True)]
    use = Use(data=data).train(1)
    data.append(data[0])
    use.train()


def foreign_parameters() -> None:
    model = network()
    everything = [*model.parameters(), nn.Parameter(torch.zeros(3))]
    make_private(model, torch.optim.SGD(everything, lr=1.0), DATA, epsilon=1, steps=1, batch_size=2)


def left_out() -> None:
    model = network()
    make_private(model, torch.optim.SGD(model[0].parameters(), lr=1.0), DATA, epsilon=1, steps=1, batch_size=2)


def twice() -> None:
    use = Use()
    make_private(use.model, use.optimizer, DATA, epsilon=1, steps=1, batch_size=2)


def nested() -> None:
    use = Use()
    outer = nn.Sequential(use.model, nn.Linear(2, 2))
    make_private(outer, torch.optim.SGD(outer.parameters(), lr=1.0), DATA, epsilon=1, steps=1, batch_size=2)


def lbfgs() -> None:
    model = network()
    make_private(model, torch.optim.LBFGS(model.parameters()), DATA, epsilon=1, steps=1, batch_size=2)


def sparse_adam() -> None:
    model = network()
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    make_private(model, optimizer, DATA, epsilon=1, steps=1, batch_size=2)


def table() -> None:
    import pandas as pd

    Use(data=pd.DataFrame(X.numpy()).rename(columns=str))


def wrapped() -> None:
    from accelerate.optimizer import AcceleratedOptimizer  # one of several: they step when they see fit

    model = network()
    inside = torch.optim.SGD(model.parameters(), lr=1.0)
    inner = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
    inner.optimizer = inside
    make_private(model, inner, DATA, epsilon=1, steps=1, batch_size=2)


def drawing(**options: Any) -> None:
    for _ in Use().private.batches(MICROBATCH, **options):
        pass


def other_order() -> None:
    drawing(order=lambda drawn: drawn[:-1])


def mixing() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x - x.mean(0))

    model = Mixing()
    check = lambda rows: F.cross_entropy(model(X[rows]), Y[rows], reduction="none")  # noqa: E731
    Use(model, check=check)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(DATA)


class Stages(Alone):
    stages = 2


def scaled(use: Use) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(use.optimizer)


def another_optimizer(use: Use) -> None:
    torch.optim.SGD(use.model.parameters(), lr=0.1).step()


def hooked() -> None:
    use = Use()
    use.model[0].weight.register_hook(lambda g: g * 10)
    use.train()


def hooked_behind() -> None:
    use = Use()
    use.model[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(10))
    use.train()


def left_eval_mode() -> None:
    model = network(nn.Dropout(0.3))
    model[2].eval()
    use = Use(model).train(1)
    model.train()
    use.train()


def trained_on() -> None:
    use = Use()
    state = use.train(1).private.state_dict()
    use.train(1).private.detach()
    Use(use.model).private.load_state_dict(state)


def altered(**changes: Any) -> Callable[[], None]:
    """A state of two steps in which something is another, loaded where the model and the optimiser are right."""

    def load() -> None:
        use = Use()
        state = use.train(2).private.state_dict()
        use.private.detach()
        again = Use(use.model)
        again.optimizer.load_state_dict(state["optimizer"])
        made = {name: do(state[name]) if callable(do) else do for name, do in changes.items()}
        before = again.private.mechanism.noise.key
        try:
            again.private.load_state_dict({**state, **made})
        except UserError:
            assert again.private.mechanism.noise.key == before and not again.private.executed
            raise

    return load


def in_another_order(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.roll(1) if name == "0.weight" else value for name, value in state.items()}


def faster(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "param_groups": [{**group, "lr": 1.0} for group in state["param_groups"]]}


def without_a_seal() -> None:
    use = Use()
    state = {name: value for name, value in use.private.state_dict().items() if name != "seal"}
    use.private.load_state_dict(state)


def does_not_fit() -> None:
    state = Use(network(nn.Linear(8, 8))).train(1).private.state_dict()
    use = Use(network(nn.Sequential(nn.Linear(8, 8))), seed=4)
    before = use.private.mechanism.noise.key
    try:
        use.private.load_state_dict(state)
    finally:
        assert use.private.mechanism.noise.key == before and not use.private.executed


def state_within_a_step() -> None:
    use = Use()
    use.optimizer.register_step_post_hook(lambda *_: use.private.state_dict())
    use.train()


class Apart(Alone):
    """Two processes, of which one loaded a state."""

    def gather(self, value: Any) -> list[Any]:
        return [value, ("another", 2)]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "none of epsilon, noise_multiplier and plan": (lambda: make(noise_multiplier="none"), "0 of epsilon"),
    "two of epsilon, noise_multiplier and plan": (lambda: make(epsilon=1.0), "2 of epsilon"),
    "neither epochs nor steps": (lambda: make(steps="none"), "neither of epochs and steps"),
    "both epochs and steps": (lambda: make(epochs=1), "both of epochs and steps"),
    "epochs that are no length": (lambda: make(steps="none", epochs=-1), "epochs=-1"),
    "no batch_size, or one out of range": (lambda: make(batch_size=EXAMPLES + 1), "batch_size=41"),
    "epsilon out of range": (lambda: make(noise_multiplier="none", epsilon=-1.0), "epsilon is -1"),
    "a threshold out of range": (lambda: make(threshold=-1.0), "threshold=-1.0 must be greater"),
    "a quantile out of range": (lambda: make(target_quantile=1.5), "target_quantile=1.5 must"),
    "a misspelt policy, rule or way to norms": (lambda: make(policy="Adaptive"), "policy=Adaptive is not one of"),
    "a setting that nothing reads": (lambda: make(clip="flat", target_quantile=0.5), "target_quantile=0.5 changes not"),
    "a threshold to which nothing is held": (
        lambda: make(clip="adaptive_flat", initial_threshold=0.5, threshold=3.0),
        r"threshold=3.0 changes nothing: .* initial_threshold=0.5 .* \(rescale=false\)",
    ),
    "a setting of another type": (lambda: make(threshold="1"), "threshold='1' does not fit: a number was"),
    "a misspelling in a whole `ClipConfig`": (lambda: make(clip=ClipConfig(policy="quantile")), "policy=quantile is"),
    "one adaptive threshold, rescaled to what it was": (lambda: make(clip="flat", policy="adaptive"), "pins the one"),
    "no budget for the counts of adaptive thresholds": (lambda: make(quantile_budget=0.0), "quantile_budget=0"),
    'an unknown mode, or `clip="none"`': (
        lambda: make(clip="adaptive_layers"),
        "no clipping mode .did you mean adaptive_layer",
    ),
    "an unknown setting": (lambda: make(target_quantle=0.5), "did you mean target_quantile"),
    "an unknown allocation of the noise": (lambda: make(noise="local"), "noise='local'"),
    "a partition without a group": (lambda: make(clip=()), r"clip=\(\) does not fit: a mode's name, a partition"),
    "a partition that misses a layer": (lambda: make(clip=per_layer(network())[:1]), "group"),
    "a plan of shuffled batches": (lambda: with_plan(plan(sampling="shuffle")), "guarantees nothing"),
    "a plan of other data or groups": (lambda: with_plan(plan(num_groups=3)), "num_groups=3"),
    "a plan without the counts' budget, or with it for nothing": (
        lambda: with_plan(plan(quantile_budget=0.0)),
        "does not go with",
    ),
    "a plan, and steps or delta beside it": (lambda: with_plan(plan(), steps=3), "plan says"),
    "data without a length": (lambda: make(data=Stream()), "without a length"),
    "a DataLoader (shuffled batches)": (lambda: make(data=DataLoader(DATA, 4, shuffle=True)), "DataLoader"),
    "columns of examples in place of a dataset": (lambda: make(data=(X, Y)), r"TensorDataset\(x, y\)"),
    "a table whose `[0]` is a column, or none": (table, r"data is a DataFrame, whose data\[0\] is no example"),
    "data that grow or shrink afterwards": (grown, "have 41 now"),
    "BatchNorm": (lambda: make(model=network(nn.BatchNorm1d(8))), "BatchNorm"),
    "DataParallel or DistributedDataParallel": (lambda: make(model=nn.DataParallel(network())), "DataParallel"),
    "stages of a pipeline": (lambda: make(ranks=Stages()), "pipelines of 2 stages"),
    "examples that mix in the model, with `check=`": (mixing, "batch"),
    "`check=` that returns no tensor": (lambda: make(check=lambda rows: None), "check= gave a NoneType"),
    "two trainings, of which one draws before the other's `backward`": (two_trainings, "before another private train"),
    "torch seeded while the losses are made": (lambda: in_the_loop(seeded), "was seeded .* not from the secret key"),
    "a training in another process than the one that made it": (in_a_fork, "a fork would add the same noise"),
    "parameters in the optimizer that are not the model's": (foreign_parameters, "not the model's"),
    "trainable parameters that are not in the optimizer": (left_out, "not in the optimizer"),
    "a parameter group added to the optimizer later": (
        lambda: in_the_loop(then(more_in_the_optimizer)),
        "not the model's",
    ),
    "LBFGS": (lbfgs, "LBFGS"),
    "SparseAdam": (sparse_adam, "SparseAdam takes sparse gradients"),
    "an optimizer that another library has wrapped": (wrapped, "optimizer.optimizer"),
    "`make_private` twice on one model": (twice, "already"),
    "`make_private` on a model with a private part": (nested, "already"),
    "a mean loss, or any that is not one number an example": (
        lambda: in_the_loop(lambda use, x, y: use.private.backward(use.losses(x, y).mean())),
        "losses has shape",
    ),
    "losses of more or fewer examples than were drawn": (
        lambda: in_the_loop(lambda use, x, y: use.private.backward(use.losses(X[:9], Y[:9]))),
        "losses has shape",
    ),
    "another model's losses": (lambda: in_the_loop(other_model), "not the model's"),
    "`backward` outside of `batches`": (lambda: Use().private.backward(torch.ones(3)), "no microbatch"),
    "two `backward` for one microbatch": (
        lambda: in_the_loop(then(lambda use: use.private.backward(torch.ones(4)))),
        "no microbatch",
    ),
    "a microbatch that is skipped": (no_backward, "had no private.backward"),
    "`loss.backward()`": (lambda: in_the_loop(past_the_engine), "engine.backward|nothing new"),
    "a penalty's own `backward()`": (lambda: in_the_loop(then(penalty)), "Gradients were changed"),
    "`clip_grad_norm_`, or any other change of `.grad`": (
        lambda: in_the_loop(then(lambda use: nn.utils.clip_grad_norm_(use.model.parameters(), 0.1))),
        "Gradients were changed",
    ),
    "another optimizer's step within a batch": (lambda: in_the_loop(then(another_optimizer)), "within a batch"),
    "`register_hook` on a parameter": (hooked, "'0.weight' has a hook"),
    "`register_post_accumulate_grad_hook`": (hooked_behind, "'0.weight' has a hook"),
    "`model.train()` over a module that was in eval mode": (left_eval_mode, "Module '2' was in eval mode"),
    "`optimizer.zero_grad()` between microbatches": (
        lambda: in_the_loop(lambda use, x, y: (use.optimizer.zero_grad(), well(use, x, y))),
        "Gradients were changed",
    ),
    "`GradScaler.step`": (lambda: in_the_loop(then(scaled)), "without noise"),
    "`optimizer.step()`: a step without noise": (
        lambda: in_the_loop(then(lambda use: use.optimizer.step())),
        "without noise",
    ),
    "`step` before `backward`": (lambda: in_the_loop(lambda use, x, y: None), "nothing new"),
    "`step` twice: a second noise": (lambda: in_the_loop(then(lambda use: use.private.step())), "nothing new"),
    "`mechanism.close()` by hand: a second noise": (lambda: Use().train(1).private.mechanism.close(), "nothing to rel"),
    "`step` left out": (no_step, "was not called"),
    "`step` outside of the loop": (step_outside, "nothing new"),
    "more steps than were planned": (lambda: Use().train().train(), "All 3 steps"),
    "two loops at once": (two_loops, "is over"),
    "a parameter frozen or thawed later": (frozen_later, "frozen"),
    "a parameter added or replaced later": (added_later, "added"),
    "anything after `detach`": (closed, "detached"),
    "a state of another plan": (other_state, "another plan"),
    "a state of another model": (does_not_fit, "does not fit this model"),
    "a state taken in the middle of a step": (state_within_a_step, "within a step"),
    "a state loaded in one of several processes": (lambda: Use(ranks=Apart()).train(), "other steps than each other"),
    "a state of something else": (no_state, "none of a private training"),
    "a state whose tensors trained on (the noise of those steps again)": (trained_on, "trained on after"),
    "a state with another step (the same noise again)": (altered(step=0), "altered"),
    "a state without a seal, as earlier versions made them": (without_a_seal, "an earlier version's"),
    "a state loaded after steps were taken (the same noise again)": (back_in_time, "going back"),
    "`copy.deepcopy(private)` (the same noise again)": (lambda: copy.deepcopy(Use().private), "not copied"),
    "`pickle.dumps(private)`": (lambda: pickle.dumps(Use().private), "not copied"),
    "an `order` that leaves examples out": (other_order, "other examples than were drawn"),
    "an `order` of floats": (lambda: drawing(order=lambda drawn: drawn.astype(float)), "type float64"),
    "an `order` that is no function": (lambda: drawing(order="x"), "order='x' does not fit"),
    "a `collate_fn` that is no function": (lambda: drawing(collate_fn=5), "collate_fn=5 does not fit"),
    "a number of workers that is none": (lambda: drawing(num_workers=-1), "num_workers=-1 is out of range"),
    "a microbatch size that is none": (lambda: Use().private.batches(0), "microbatch=0"),
}


KINDS = {
    **dict.fromkeys(("epsilon", "noise_multiplier", "batch_size", "epochs", "steps", "delta"), "1"),
    **dict.fromkeys(("plan", "check", "noise_source", "ranks", "model", "optimizer", "clip"), 5),
}
"""Argument -> a value that it does not take."""


@pytest.mark.parametrize("name", KINDS)
def test_an_argument_of_another_type_is_told_with_what_was_expected(name):
    model = network()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data": DATA, "epsilon": 1}
    expected = rf"^{name}={re.escape(repr(KINDS[name]))} does not fit: .* expected\.$"
    with pytest.raises(UserError, match=expected):
        make_private(**{**given, "steps": 1, "batch_size": 2, name: KINDS[name]})
    if name in ("model", "optimizer", "clip"):
        with pytest.raises(UserError, match=f"^{name}=None does not fit"):
            make_private(**{**given, "steps": 1, "batch_size": 2, name: None})


@pytest.mark.parametrize("kind", [lambda losses: (losses, 1), lambda losses: losses.tolist(), lambda losses: X.numpy()])
def test_losses_that_are_no_tensor_are_told_from_losses_of_another_shape(kind):
    model = network()
    with pytest.raises(UserError, match=r"^check= gave a \w+, and losses are a tensor: return one loss for each"):
        Use(model, check=lambda rows: kind(model(X[rows]).sum(1)))
    with pytest.raises(UserError, match="one value per example"):
        Use(model, clip="flat", check=lambda rows: model(X).mean())


@pytest.mark.parametrize("number", ["2", 0.5, True, float("nan"), None])
def test_a_number_of_workers_is_whole(number):
    with pytest.raises(UserError, match=f"^num_workers={number!r} is out of range"):
        drawing(num_workers=number)


def test_a_dict_of_columns_is_no_dataset_and_one_of_numbered_examples_is():
    with pytest.raises(UserError, match=r"data is a dict, whose data\[0\] is no example"):
        make(data={"x": X, "y": Y})
    Use(data=dict(enumerate(zip(X, Y, strict=True)))).train(1)


def test_an_order_may_be_a_list_and_a_number_of_workers_of_numpy():
    private = Use().private
    x, _ = next(private.batches(MICROBATCH, order=lambda drawn: [int(row) for row in drawn], num_workers=np.int64(0)))
    assert len(x) == MICROBATCH


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("target_epsilon", "did you mean epsilon?"),
        ("target_delta", "did you mean delta?"),
        ("max_grad_norm", "did you mean threshold?"),
        ("batchsize", "did you mean batch_size?"),
        ("sample_rate", "give batch_size, which is"),
        ("lr", "the optimizer has it"),
    ],
)
def test_other_libraries_names_of_arguments_are_answered_by_ours(name, ours):
    with pytest.raises(UserError, match=f"no setting '{name}'.*{re.escape(ours)}"):
        Use(**{name: 1.0})


@pytest.mark.parametrize("misuse", REFUSED, ids=lambda name: name.replace("`", ""))
def test_is_refused_in_one_sentence(misuse):
    do, told = REFUSED[misuse]
    with pytest.raises(UserError, match=told) as caught:
        do()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_the_page_says_how_many():
    page = (Path(__file__).parents[1] / "docs" / "sharp_edges.md").read_text()
    assert f"[{len(REFUSED)} ways](../tests/test_private_misuse.py)" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -3},
        {"step": 100},
        {"step": 2.0},
        {"step": "a"},
        {"thresholds": {"thresholds": torch.ones(2)}},
        {"model": in_another_order},
        {"model": None},
        {"optimizer": faster},
        {"optimizer": {}},
        {"optimizer": None},
        {"noise_key": b"k" * 32},
    ],
    ids=lambda changes: next(f"{key}={getattr(value, '__name__', value)}" for key, value in changes.items()),
)
def test_a_state_is_refused_if_anything_of_it_is_another(changes):
    with pytest.raises(UserError, match="or were altered"):
        altered(**changes)()


def test_a_state_that_nothing_altered_is_taken():
    assert altered(settings="of the user's own")() is None
