"""Every step refuses parameters that changed after attaching, and layers that the loss does not reach."""

import pytest
import torch
from torch import nn

from groupwise.errors import UserError
from tests.clipping.modes import FEW, attached
from tests.clipping.traced import clip_batch

MODES = (*FEW, "block")


class Branches(nn.Module):
    """Two blocks; `use` leaves the second one out (no) or multiplies it by 0 (zero)."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.blocks, self.head, self.use = nn.ModuleList(blocks), nn.Linear(4, 2), "yes"

    def forward(self, x):
        x = self.blocks[0](x)
        if self.use != "no":
            x = x + self.blocks[1](x) * (self.use == "yes")
        return self.head(x)


@pytest.fixture(params=MODES)
def engine_and_step(request):
    """An engine after its first step, and a function that runs another step."""
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(3, 4)
    engine = attached(model, request.param, 0.1)

    def step():
        model.zero_grad()
        engine.reset()
        clip_batch(engine, lambda x: model(x).square().sum(1), x)

    step()
    return engine, step


@pytest.mark.parametrize(("name", "other"), [("weight", nn.Parameter(torch.ones(2, 4))), ("bias", None)])
def test_a_replaced_or_removed_parameter_is_refused(engine_and_step, name, other):
    engine, step = engine_and_step
    setattr(engine.model.head, name, other)
    with pytest.raises(UserError, match=rf"'head\.{name}' was added, removed, replaced"):
        step()


def test_data_of_another_shape_or_dtype_is_refused(engine_and_step):
    engine, step = engine_and_step
    engine.model.head.weight.data = torch.ones(3, 4)
    with pytest.raises(UserError, match=r"'head\.weight' was .* cast"):
        engine.check_output(torch.zeros(3, requires_grad=True))
    engine.model.head.weight.data = torch.ones(2, 4)
    step()
    engine.model.bfloat16()
    with pytest.raises(UserError, match="or cast after clipping began"):
        engine.check_output(torch.zeros(3, requires_grad=True))


def test_new_values_of_a_parameter_are_allowed(engine_and_step):
    engine, step = engine_and_step
    engine.model.load_state_dict({name: torch.ones_like(p) for name, p in engine.model.state_dict().items()})
    engine.model.head.weight.data = torch.zeros(2, 4)
    step()


def test_a_layer_that_a_later_step_leaves_out_is_refused_by_name(engine_and_step):
    engine, step = engine_and_step
    engine.model.use = "no"
    with pytest.raises(UserError, match=r"'blocks\.1\.0\.weight'"):
        step()
    engine.model.use = "zero"  # works, with gradients of 0
    step()
    assert engine.examples == 3 and all(float(p.grad.norm()) == 0 for p in engine.model.blocks[1].parameters())
