"""At every step: parameters that are no longer those that were attached, and groups that were left out, are refused."""

import pytest
import torch
from torch import nn

from groupwise.errors import UserError
from tests.clipping.modes import FEW, attached
from tests.clipping.traced import clip_batch

MODES = (*FEW, "block")


class Branches(nn.Module):
    """Two blocks; the second one is left out, or adds 0, when told so."""

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
def stepped(request):
    """An engine after its first step, and what makes another one."""
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
def test_another_parameter_in_its_place_or_none_is_refused(stepped, name, other):
    engine, step = stepped
    setattr(engine.model.head, name, other)
    with pytest.raises(UserError, match=rf"'head\.{name}' was added, removed, replaced"):
        step()


def test_data_of_another_shape_or_precision_is_refused(stepped):
    engine, step = stepped
    engine.model.head.weight.data = torch.ones(3, 4)
    with pytest.raises(UserError, match=r"'head\.weight' was .* cast"):
        engine.check_output(torch.zeros(3, requires_grad=True))
    engine.model.head.weight.data = torch.ones(2, 4)
    step()
    engine.model.bfloat16()
    with pytest.raises(UserError, match="or cast after clipping began"):
        engine.check_output(torch.zeros(3, requires_grad=True))


def test_other_values_in_the_same_parameter_are_fine(stepped):
    engine, step = stepped
    engine.model.load_state_dict({name: torch.ones_like(p) for name, p in engine.model.state_dict().items()})
    engine.model.head.weight.data = torch.zeros(2, 4)
    step()


def test_a_group_or_layer_that_a_later_step_leaves_out_is_refused_by_name(stepped):
    engine, step = stepped
    engine.model.use = "no"
    with pytest.raises(UserError, match=r"'blocks\.1\.0\.weight'"):
        step()
    engine.model.use = "zero"  # the remedy
    step()
    assert engine.examples == 3 and all(float(p.grad.norm()) == 0 for p in engine.model.blocks[1].parameters())
