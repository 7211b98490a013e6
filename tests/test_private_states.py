"""States that a private training must not go on from are refused in a sentence."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from groupwise.errors import UserError
from groupwise.training.ranks import Alone
from tests.private_use import Misuse, Use, network, refuses


def other_state() -> None:
    Use().private.load_state_dict(Use(steps=4).private.state_dict())


def other_threshold() -> None:
    Use(threshold=5.0).private.load_state_dict(Use().private.state_dict())


def of_another_optimizer() -> None:
    use = Use()
    state = use.train(1).private.state_dict()
    use.private.detach()
    Use(use.model, optimizer=torch.optim.Adam(use.model.parameters())).private.load_state_dict(state)


def no_state() -> None:
    use = Use()
    use.private.load_state_dict(use.model.state_dict())


def back_in_time() -> None:
    use = Use()
    state = copy.deepcopy(use.private.state_dict())
    use.train(1).private.load_state_dict(state)


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
        before = again.private.core.noise.key
        try:
            again.private.load_state_dict({**state, **made})
        except UserError:
            assert again.private.core.noise.key == before and not again.private.executed
            raise

    return load


def in_another_order(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.roll(1) if name == "0.weight" else value for name, value in state.items()}


def faster(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "param_groups": [{**group, "lr": 1.0} for group in state["param_groups"]]}


def without_a_checksum() -> None:
    use = Use()
    state = {name: value for name, value in use.private.state_dict().items() if name != "checksum"}
    use.private.load_state_dict(state)


def does_not_fit() -> None:
    state = Use(network(nn.Linear(8, 8))).train(1).private.state_dict()
    use = Use(network(nn.Sequential(nn.Linear(8, 8))), seed=4)
    before = use.private.core.noise.key
    try:
        use.private.load_state_dict(state)
    finally:
        assert use.private.core.noise.key == before and not use.private.executed


def state_within_a_step() -> None:
    use = Use()
    use.optimizer.register_step_post_hook(lambda *_: use.private.state_dict())
    use.train()


class Apart(Alone):
    """Two processes, of which one loaded a state."""

    replicas = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, ("another", 2) if isinstance(value, tuple) else value]


STATES: dict[str, Misuse] = {
    "a state of another plan": (other_state, "was made with .*give the same"),
    "a state of another threshold": (other_threshold, r"was made with threshold=1\.0, and here it is 5\.0"),
    "a state of another model": (does_not_fit, "does not fit this model"),
    "a state taken in the middle of a step": (state_within_a_step, "within a step"),
    "a state loaded in one of several processes": (lambda: Use(ranks=Apart()).train(), "have not the same key"),
    "a state of another kind of optimizer": (of_another_optimizer, "an optimizer with other settings than Adam has"),
    "a state of something else": (no_state, "none of a private training"),
    "a state whose tensors trained on (the noise of those steps again)": (trained_on, "trained on after"),
    "a state with another step (the same noise again)": (altered(step=0), "altered"),
    "a state without a checksum, as earlier versions made them": (without_a_checksum, "an earlier version's"),
    "a state loaded after steps were taken (the same noise again)": (back_in_time, "going back"),
    "`copy.deepcopy(private)` (the same noise again)": (lambda: copy.deepcopy(Use().private), "not copied"),
    "`pickle.dumps(private)`": (lambda: pickle.dumps(Use().private), "not copied"),
}


@pytest.mark.parametrize("misuse", STATES, ids=lambda name: name.replace("`", ""))
def test_is_refused_in_one_sentence(misuse):
    refuses(*STATES[misuse])


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


def test_a_state_of_other_microbatches_is_refused():
    """CUDA graphs fill microbatches up, so dropout's masks are others."""
    state = Use().private.state_dict()
    with pytest.raises(UserError, match=r"made with cuda_graph=True: give the same"):
        Use().private.load_state_dict({**state, "cuda_graph": True})
