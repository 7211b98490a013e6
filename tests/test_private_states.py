"""States that a private training must not resume from are refused in one sentence."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from groupwise.training.ranks import Ranks
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


def loaded_after_steps() -> None:
    use = Use()
    state = use.private.state_dict()
    use.train(1).private.load_state_dict(state)


def state_of_another_model() -> None:
    state = Use(network(nn.Linear(8, 8))).train(1).private.state_dict()
    use = Use(network(nn.LayerNorm(8)), seed=4)
    before, weight = use.private.core.noise.key, use.model[0].weight.clone()
    try:
        use.private.load_state_dict(state)
    finally:
        assert use.private.core.noise.key == before and not use.private.executed
        assert torch.equal(use.model[0].weight, weight)


def with_other(**entries: Any) -> None:
    Use().private.load_state_dict({**Use().private.state_dict(), **entries})


def with_layers(prepare: Any) -> None:
    model = network()
    prepare(model[0])
    use = Use(model, optimizer=torch.optim.SGD(model.parameters(), 0.5), clip="flat")
    use.private.load_state_dict(Use(clip="flat").private.state_dict())


def state_within_a_step() -> None:
    use = Use()
    use.optimizer.register_step_post_hook(lambda *_: use.private.state_dict())
    use.train()


class Apart(Ranks):
    """Two processes, of which one loaded a state."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas = 2

    def copy_(self, tensors: Any) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value, ("another", 2) if isinstance(value, tuple) else value]


STATES: dict[str, Misuse] = {
    "a state of another plan": (other_state, "was made with .*give the same"),
    "a state of another threshold": (other_threshold, r"was made with threshold=1\.0, but here it is 5\.0"),
    "a state of another model": (state_of_another_model, "does not fit this model"),
    "a state of other trainable layers": (
        lambda: with_layers(lambda layer: layer.requires_grad_(False)),
        r"made with trainable=\['0\.weight', '0\.bias'\], but here it is \[\]",
    ),
    "a state of layers in train mode": (lambda: with_layers(nn.Module.eval), r"made with training_mode=\['0'\]"),
    "a state of padded microbatches": (lambda: with_other(cuda_graph=True), "made with cuda_graph=True: give the same"),
    "a state of two processes": (
        lambda: with_other(processes="2 processes"),
        "made by 2 processes, but this training has 1 process,",
    ),
    "a state taken in the middle of a step": (state_within_a_step, "inside a step"),
    "a state loaded in one of several processes": (lambda: Use(ranks=Apart()).train(), "do not have the same key"),
    "a state of another kind of optimizer": (of_another_optimizer, "made with optimizer=SGD, but here it is Adam"),
    "a state of something else": (lambda: Use().private.load_state_dict(network().state_dict()), "has no noise key"),
    "a state loaded after steps were taken (the same noise again)": (loaded_after_steps, "resuming would repeat"),
    "`copy.deepcopy(private)` (the same noise again)": (lambda: copy.deepcopy(Use().private), "cannot be copied"),
    "`pickle.dumps(private)`": (lambda: pickle.dumps(Use().private), "cannot be copied"),
}


@pytest.mark.parametrize("misuse", STATES, ids=lambda name: name.replace("`", ""))
def test_a_state_is_refused_in_one_sentence(misuse):
    refuses(*STATES[misuse])
