"""Losses and recomputations whose second backward pass differs: exact in one pass, refused by ghost clipping."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from groupwise.errors import UserError
from tests.clipping.alone import assert_exact
from tests.clipping.modes import FEW, attached
from tests.clipping.traced import clip, clip_batch

pytestmark = pytest.mark.filterwarnings("ignore:groupwise has no rule")


class FusedLoss(torch.autograd.Function):
    """Cross-entropy as in fused kernels: forward computes the gradient, and backward multiplies it in place."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.g = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
        return F.cross_entropy(logits, labels, reduction="none")

    @staticmethod
    def backward(ctx, g: Tensor):
        return ctx.g.mul_(g[:, None]), None


@pytest.mark.parametrize("mode", FEW)
def test_a_loss_whose_backward_changes_its_saved_tensors_is_exact(double, mode):
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 5)
    with attached(model, mode) as engine:
        assert_exact(engine, lambda rows: FusedLoss.apply(model(x[list(rows)]), torch.tensor(list(rows)) % 3), range(6))


class Masked(nn.Module):
    """Recomputation draws another mask: the state of the generator (its `own` or torch's) is not restored."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(20, 3), torch.Generator() if own else None

    def forward(self, x: Tensor) -> Tensor:
        def masked(x: Tensor) -> Tensor:
            return self.layer(x * (torch.rand(x.shape, generator=self.generator) < 0.2))

        return checkpoint(masked, x, use_reentrant=False, preserve_rng_state=self.generator is not None)


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("own", [False, True])
def test_ghost_clipping_refuses_recomputations_that_differ(own, batch):
    model, x = Masked(own), torch.randn(6, 20)

    def losses_of(rows):
        return model(x[list(rows)]).square().sum(1)

    rows = range(batch)
    with attached(model, "ghost") as engine, pytest.raises(UserError, match="second backward pass"):
        clip(engine, losses_of, rows)
    with attached(model, "flat") as engine:  # one pass: norms and sums come from the same gradients
        clip(engine, losses_of, rows)
        assert engine.examples == batch


def test_a_tensor_in_place_of_a_parameter_is_refused():
    model = nn.Linear(4, 3)

    def losses_of(x: Tensor) -> Tensor:
        return functional_call(model, {"weight": 0.5 * model.weight}, (x,)).sum(1)

    with attached(model, "flat") as engine, pytest.raises(UserError, match=r"'weight' \(by functional_call"):
        clip_batch(engine, losses_of, torch.randn(3, 4))
