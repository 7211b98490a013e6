"""Whichever row others follow, and however little, the trace refuses it."""

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, flat
from groupwise.clipping.trace import Batches, replaced
from groupwise.errors import UserError

EXAMPLES = 6


class Leaks(nn.Module):
    """Two linear layers, between which every row gets a share of another one."""

    def __init__(self, source, share: float) -> None:
        super().__init__()
        self.a, self.b, self.source, self.share = nn.Linear(4, 8), nn.Linear(8, 3), source, share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h + self.share * self.source(h).detach())


def trace(model: nn.Module, lengths: tuple[int, ...] = (4,) * EXAMPLES) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(length) for length in lengths]

    def losses(examples) -> torch.Tensor:
        x = nn.utils.rnn.pad_sequence([rows[i] for i in examples], batch_first=True)
        return model(torch.nn.functional.pad(x, (0, 4 - x.shape[1]))).square().sum(1)

    with attach(model, flat(model), 1.0) as engine:
        engine.trace(losses, range(EXAMPLES))


SOURCES = {
    **{f"row {row}": lambda h, row=row: h[row % len(h)] for row in (*range(8), -1, -2)},
    "the mean": lambda h: h.mean(0),
    "the largest number": lambda h: h.abs().max(),
}


@pytest.mark.parametrize("lengths", [(4,) * EXAMPLES, (2, 4, 1, 3, 2, 3)], ids=["alike", "padded"])
@pytest.mark.parametrize("share", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("source", [name for name in SOURCES if name != "the largest number"])
def test_a_share_of_any_row_is_seen(source, share, lengths):
    torch.manual_seed(1)
    with pytest.raises(UserError, match=r"mixe[sd]"):
        trace(Leaks(SOURCES[source], share), lengths)


@pytest.mark.parametrize("share", [1e-1, 1e-3])
@pytest.mark.parametrize("seed", range(3))
def test_a_scale_by_the_largest_number_is_seen(seed, share):
    torch.manual_seed(seed)
    with pytest.raises(UserError, match=r"mixe[sd]"):
        trace(Leaks(SOURCES["the largest number"], share))


def test_rows_of_their_own_pass():
    trace(Leaks(lambda h: h, 0.1))
    trace(Leaks(lambda h: h, 0.1), (2, 4, 1, 3, 2, 3))


@pytest.mark.parametrize("count", range(2, EXAMPLES + 1))
def test_between_them_two_orders_replace_each_row_by_another_example_and_keep_all(count):
    batches = Batches.of(range(count))
    assert sorted(batches.swapped) == sorted(batches.more)
    both = batches.more, batches.swapped
    twice = {row for batch in both for row in range(count + 2) if batch.count(batch[row]) > 1}
    assert twice == set(range(count + 2))
    for batch in both:
        for row in range(len(batch)):
            changed = replaced(batch, row)
            assert [i for i in range(len(batch)) if changed[i] != batch[i]] == [row]
            assert batch.count(batch[row]) == 1 or set(changed) == set(batch)
