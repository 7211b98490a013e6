"""Ways to leave the loop and come back change no bit, and a refusal leaves everything as it was."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from groupwise import Private
from groupwise.clipping import flat
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from tests.private_use import EXAMPLES, MICROBATCH, Use, X, Y, network, other_model, well


def left_in_the_middle(use: Use) -> None:
    for x, y in use.private.batches(MICROBATCH):
        well(use, x, y)
        break
    use.train()


def zero_grad_first(use: Use) -> None:
    for x, y in use.private.batches(EXAMPLES):
        use.optimizer.zero_grad()
        well(use, x, y)
        use.private.step()


def whole(use: Use) -> None:
    for x, y in use.private.batches(EXAMPLES):
        well(use, x, y)
        use.private.step()


def an_error_in_the_loop(use: Use) -> None:
    with pytest.raises(KeyError):
        for x, y in use.private.batches(MICROBATCH):
            well(use, x, y)
            raise KeyError
    use.train()


def seeds_everywhere(use: Use) -> None:
    for x, y in use.private.batches(MICROBATCH):
        well(use, x, y)
        torch.manual_seed(0)
        use.private.step()


def evaluates(use: Use) -> None:
    for x, y in use.private.batches(MICROBATCH):
        with torch.no_grad():
            use.model.eval()(X)
        use.model.train()
        well(use, x, y)
        use.private.step()


def refused_losses_and_again(use: Use) -> None:
    for x, y in use.private.batches(MICROBATCH):
        losses = use.losses(x, y)
        with pytest.raises(UserError):
            use.private.backward(losses.mean())
        use.private.backward(losses)
        use.private.step()


def loop_of_epochs(use: Use) -> None:
    while use.private.executed < use.private.plan.steps:
        use.train(1)


HARMLESS: dict[str, tuple[Callable[[Use], object], Callable[[Use], object]]] = {
    "leaving the loop in the middle of a batch": (left_in_the_middle, Use.train),
    "an error in the loop, and a new loop": (an_error_in_the_loop, Use.train),
    "`torch.manual_seed` in the loop": (seeds_everywhere, Use.train),
    "evaluating in the loop": (evaluates, Use.train),
    "losses that were refused for their shape, then right ones": (refused_losses_and_again, Use.train),
    "a loop for each few steps": (loop_of_epochs, Use.train),
    "`optimizer.zero_grad()` before a batch of one microbatch": (zero_grad_first, whole),
}


@pytest.mark.parametrize("misuse", HARMLESS, ids=lambda name: name.replace("`", ""))
def test_is_harmless(misuse):
    """The same weights, to the bit, and the same steps on the account."""
    do, usual = HARMLESS[misuse]
    model = [network(nn.Dropout(0.3)) for _ in range(2)]
    model[1].load_state_dict(model[0].state_dict())
    held, right = Use(model[0]), Use(model[1])
    do(held)
    usual(right)
    assert torch.equal(held.weights, right.weights)
    assert held.private.executed == right.private.executed == 3


def test_what_is_refused_releases_nothing():
    use = Use().train(1)
    before, executed = use.weights, use.private.executed
    for misuse in (use.private.step, use.optimizer.step, lambda: use.private.backward(torch.ones(3))):
        with pytest.raises(UserError):
            misuse()
    assert torch.equal(use.weights, before) and use.private.executed == executed


def test_after_a_failed_backward_the_batch_begins_again():
    use, right = Use(), Use()
    with pytest.raises(UserError):
        for x, y in use.private.batches(MICROBATCH):
            other_model(use, x, y)
    assert torch.equal(use.train().weights, right.train().weights)


def test_a_call_that_is_refused_leaves_the_model_as_it_was():
    model = network()
    with pytest.raises(UserError):
        Use(model, steps=None)
    assert all("forward" not in vars(module) for module in model.modules())
    model[0].weight.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert Use(model).train().private.executed == 3


def test_after_detach_the_model_and_the_optimizer_are_the_users_again():
    use = Use().train(1)
    use.private.detach()
    use.losses(X, Y).mean().backward()
    use.optimizer.step()
    assert isinstance(Use(use.model).private, Private)
    assert math.isfinite(float(use.weights.sum()))


def test_a_step_that_fails_after_its_noise_is_counted_and_its_noise_not_drawn_again():
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    use = Use()
    opened = []
    inner = use.private.mechanism.open
    use.private.mechanism.open = lambda step: opened.append(step) or inner(step)
    hook = use.optimizer.register_step_post_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        use.train()
    hook.remove()
    assert use.private.executed == 1
    use.train()
    assert opened == [0, 1, 2] and use.private.executed == 3


def test_detaching_within_a_batch_leaves_no_sums_behind():
    use = Use().train(1)
    for x, y in use.private.batches(MICROBATCH):
        well(use, x, y)
        break
    use.private.detach()
    assert all(parameter.grad is None for parameter in use.model.parameters())


def test_a_state_brings_the_way_of_its_noise_along():
    pytest.importorskip("cryptography")
    model = network()
    secure = Use(model, noise_source=NoiseSource.fresh(secure=True)).train(1).private
    state = copy.deepcopy(secure.state_dict())
    secure.detach()
    again = Use(model)
    again.private.load_state_dict(state)
    found = again.private.mechanism
    assert found.noise.secure and type(found.sampler) is type(secure.mechanism.sampler)


def test_a_number_of_numpy_s_is_one():
    use = Use(threshold=np.float32(0.5), target_quantile=np.float64(0.7))
    assert use.private.mechanism.thresholds.rescale_to == 0.5


def test_a_partition_of_one_group_may_be_clipped_by_ghost_norms():
    model = network()
    assert Use(model, clip=flat(model), norms="ghost", policy="fixed").train().private.executed == 3
