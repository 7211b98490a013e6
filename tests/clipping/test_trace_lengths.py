"""Examples with two lengths, sources and targets say: the longest source and the longest target are of two examples."""

import pytest
import torch
from torch import Tensor, nn

from groupwise.clipping import attach, flat
from groupwise.errors import UserError
from tests.clipping.alone import assert_exact
from tests.clipping.test_trace import of_rows

pytestmark = pytest.mark.usefixtures("double")

SOURCES, TARGETS = (9, 3, 5, 4, 6, 2, 7), (2, 8, 3, 5, 4, 6, 3)


class Translator(nn.Module):
    """Reads as many tokens as the longest source and the longest target of the batch have."""

    def __init__(self):
        super().__init__()
        self.source, self.target, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        read = self.source(x[:, : int(sources.max())]).tanh()
        read = (read * (torch.arange(read.shape[1]) < sources[:, None])[..., None]).sum(1, keepdim=True)
        written = self.target(x[:, : int(targets.max())])
        written = written * (torch.arange(written.shape[1]) < targets[:, None])[..., None]
        return self.head(written.tanh() * read).sum(1)


def losses_of(model: Translator):
    x = torch.randn(7, 9, 4)
    sources, targets = torch.tensor(SOURCES), torch.tensor(TARGETS)

    def run(at: Tensor) -> Tensor:
        rows = at[:, 0].long()
        return model(x[rows], sources[rows], targets[rows])

    return of_rows(run, torch.arange(7.0)[:, None])


@pytest.mark.parametrize("order", [range(7), (0, 2, 1, 3, 4, 5, 6), (3, 2, 4, 5, 0, 1)])
def test_two_lengths_are_traced_wherever_the_longest_examples_stand(order):
    torch.manual_seed(0)
    model = Translator()
    losses = losses_of(model)
    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses, list(order))
        plan = engine.plan
        for rows in ([0, 1, 2], [4, 5, 6, 3], [2], [1, 5]):
            assert_exact(engine, losses, rows)
        assert engine.plan == plan


def test_rows_that_data_choose_are_refused_all_the_same():
    torch.manual_seed(0)
    x, layer = torch.randn(7, 3), nn.Linear(3, 2)

    def chosen(rows):
        return torch.stack([layer(x[list(rows)][x[list(rows), 0] > 0]).sum() for _ in rows])

    with attach(layer, flat(layer), 1.0) as engine, pytest.raises(UserError, match="data choose"):
        engine.trace(chosen, range(7))
