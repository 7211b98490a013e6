"""Leaving the loop and acting between steps change no bit of a training, and a refused call changes nothing."""

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from groupwise import Private, detach, make_private
from groupwise.clipping import flat
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from tests.private_use import DATA, Use, X, Y, cross_entropy, network


def left_in_the_middle(use: Use) -> None:
    for _ in use.private.steps():
        break
    use.train()


def an_error_in_the_loop(use: Use) -> None:
    with pytest.raises(KeyError):
        for _ in use.private.steps():
            raise KeyError
    use.train()


def between_steps(do: Callable[[Use], object]) -> Callable[[Use], None]:
    def train(use: Use) -> None:
        do(use)
        for _ in use.private.steps():
            do(use)

    return train


def evaluates(use: Use) -> None:
    with torch.no_grad():
        use.model.eval()(X)


def another_loss(use: Use) -> None:
    """The next step discards these gradients."""
    cross_entropy(use.model, (X, Y)).mean().backward()
    nn.utils.clip_grad_norm_(use.model.parameters(), 0.1)


def loop_of_epochs(use: Use) -> None:
    while use.private.executed < use.private.plan.steps:
        use.train(1)


def two_loops(use: Use) -> None:
    loops = [iter(use.private.steps()) for _ in range(2)]
    taken = [next(loops[turn]).number for turn in (0, 1, 0)]
    assert taken == [1, 2, 3] and [list(loop) for loop in loops] == [[], []]


def one_by_one(use: Use) -> None:
    assert [use.private.step().number for _ in range(3)] == [1, 2, 3]


HARMLESS: dict[str, Callable[[Use], object]] = {
    "leaving the loop": left_in_the_middle,
    "an error in the loop, and a new loop": an_error_in_the_loop,
    "`torch.manual_seed` between steps": between_steps(lambda _: torch.manual_seed(0)),
    "evaluating, and leaving the model in eval mode": between_steps(evaluates),
    "`model.train()` over a module that was in eval mode": between_steps(lambda use: use.model.train()),
    "a loop for each few steps": loop_of_epochs,
    "two loops at once": two_loops,
    "`step` by hand": one_by_one,
    "`optimizer.zero_grad()` between steps": between_steps(lambda use: use.optimizer.zero_grad()),
    "`loss.backward()` and `clip_grad_norm_` between steps": between_steps(another_loss),
    "`state_dict` between steps": between_steps(lambda use: use.private.state_dict()),
}


@pytest.mark.parametrize("action", HARMLESS, ids=lambda name: name.replace("`", ""))
def test_action_changes_neither_weights_nor_the_number_of_steps(action):
    models = [network(nn.Dropout(0.3), nn.Sequential(nn.Dropout(0.5))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model[3].eval()
    tested, plain = (Use(model) for model in models)
    HARMLESS[action](tested)
    plain.train()
    assert torch.equal(tested.weights, plain.weights)
    assert tested.private.executed == plain.private.executed == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_gives_dataset_workers_and_collate_fn_with_a_warning(workers):
    def collate(rows):
        seen.append(len(rows))
        return torch.utils.data.default_collate(rows)

    seen: list[int] = []
    loader = DataLoader(DATA, 4, shuffle=True, collate_fn=collate, num_workers=workers)
    with pytest.warns(UserWarning, match=r"Its sampler and batch size are not, as every step draws") as warned:
        default = Use(data=loader)
    assert warned[0].filename == __file__.replace("test_private_harmless", "private_use"), "the caller of make_private"
    assert torch.equal(default.train().weights, Use().train().weights)
    assert seen and default.private._sums.num_workers == workers
    with pytest.warns(UserWarning, match="data is a DataLoader"):
        changed = Use(data=loader, num_workers=0, collate_fn=torch.utils.data.default_collate)
    assert changed.private._sums.num_workers == 0 and torch.equal(changed.train().weights, default.weights)


def test_a_refused_step_releases_nothing():
    use = Use().train(1)
    before, executed = use.weights, use.private.executed
    with pytest.raises(UserError):
        use.optimizer.step()
    handle = use.model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UserError):
        use.private.step()
    handle.remove()
    assert torch.equal(use.weights, before) and use.private.executed == executed
    assert torch.equal(use.train().weights, Use().train().weights)


def test_a_first_step_that_fails_is_no_earlier_training():
    use = Use()
    handle = use.model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UserError):
        use.private.step()
    handle.remove()
    use.private.detach()
    assert "Not included" not in Use(use.model).train(1).private.statement()


def test_a_call_that_is_refused_leaves_the_model_as_it_was():
    model = network()
    with pytest.raises(UserError):
        Use(model, steps=None)
    with pytest.raises(UserError):
        Use(model, losses=lambda model, batch: cross_entropy(model, batch).mean())
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    model[0].weight.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert Use(model).train().private.executed == 3


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_in_the_losses_moves_nothing(fused):
    model, optimizers = network(), []
    plain = Use(copy.deepcopy(model)).train()

    def losses(model, batch):
        for optimizer in optimizers:
            optimizer.step()
        return cross_entropy(model, batch)

    use = Use(model, losses=losses)
    optimizers += [use.optimizer, torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)]
    assert torch.equal(use.train().weights, plain.weights)


def test_a_deleted_training_is_detached_by_its_model():
    use = Use()
    use.train(1)
    del use.private
    detach(use.model)
    make_private(use.model, use.optimizer, DATA, cross_entropy, noise_multiplier=1.0, steps=1, batch_size=2).step()


def test_between_steps_and_after_detach_the_model_is_unwrapped():
    use = Use()
    for _ in use.private.steps(1):
        assert all("forward" not in vars(module) for module in use.model.modules())
        copied = cross_entropy(copy.deepcopy(use.model), (X, Y)).mean()
        assert torch.equal(copied, cross_entropy(use.model, (X, Y)).mean())
    use.private.detach()
    cross_entropy(use.model, (X, Y)).mean().backward()
    use.optimizer.step()
    assert isinstance(Use(use.model).private, Private)
    assert math.isfinite(float(use.weights.sum()))


def test_a_step_that_fails_after_its_noise_is_counted_and_not_repeated():
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    use = Use()
    drawn = []
    inner = use.private.core.sampler.indices
    use.private.core.sampler.indices = lambda step: drawn.append(step) or inner(step)
    hook = use.optimizer.register_step_post_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        use.train()
    hook.remove()
    assert use.private.executed == 1
    use.train()
    assert drawn == [0, 1, 2] and use.private.executed == 3


def test_nonfinite_examples_are_left_out_and_counted_as_not_private():
    x = X.clone()
    x[[0, 7]] = float("nan")  # the first is among those that are checked before training
    use = Use(data=torch.utils.data.TensorDataset(x, Y), batch_size=40)
    with warnings.catch_warnings(action="default", record=True) as warned:
        counts = [step.nonprivate["nonfinite"] for step in use.private.steps()]
    assert counts == [2, 2, 2] and bool(use.weights.isfinite().all())
    [warning] = warned
    assert "look for NaN in the data" in str(warning.message)


@pytest.mark.parametrize(
    ("scale", "error"),
    [(torch.nan, "None of the 6 .* has a finite loss"), (1e30, r"example \d+ in group 'all' .* overflows")],
)
def test_data_without_finite_gradients_are_refused_before_training(scale, error):
    with pytest.raises(UserError, match=error):
        Use(data=torch.utils.data.TensorDataset(X * scale, Y), clip="flat")


def test_loading_a_state_restores_the_kind_of_noise():
    pytest.importorskip("cryptography")
    model = network()
    secure = Use(model, noise_source=NoiseSource.fresh(secure=True)).train(1).private
    state = copy.deepcopy(secure.state_dict())
    secure.detach()
    again = Use(model)
    again.private.load_state_dict(state)
    core = again.private.core
    assert core.noise.secure and type(core.sampler) is type(secure.core.sampler)


def test_a_partition_of_one_group_may_be_clipped_by_ghost_norms():
    model = network()
    assert Use(model, clip=flat(model), norms="ghost", policy="fixed").train().private.executed == 3


def test_set_threshold_scales_the_noise_and_is_resumed():
    use = Use(clip="fixed_layer", threshold=1.0)
    before = use.private.core.step().noise_norm
    use.private.set_threshold(3.0)
    again = Use(clip="fixed_layer", threshold=1.0)
    again.private.load_state_dict(copy.deepcopy(use.private.state_dict()))
    assert use.private.core.step().noise_norm == pytest.approx(3.0 * before)
    assert again.train(1).private.thresholds == use.private.thresholds
    assert torch.equal(again.weights, use.weights)
    with pytest.raises(UserError, match="is for fixed thresholds"):
        Use().private.set_threshold(2.0)
    with pytest.raises(UserError, match="finite numbers above 0"):
        use.private.set_threshold(0.0)
