"""The trace refuses any dependence on another row of the batch, however small."""

import pytest
import torch
from torch import nn

from groupwise.clipping import attach, flat
from groupwise.clipping.trace import Batches, exchanged, replaced
from groupwise.errors import UserError

EXAMPLES = 6


class Leaks(nn.Module):
    """Two linear layers; between them a `share` of other rows is added to every row."""

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
    "the largest value": lambda h: h.abs().max(),
}


@pytest.mark.parametrize("lengths", [(4,) * EXAMPLES, (2, 4, 1, 3, 2, 3)], ids=["equal lengths", "padded"])
@pytest.mark.parametrize("share", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("source", [name for name in SOURCES if name != "the largest value"])
def test_a_small_share_of_any_row_is_refused(source, share, lengths):
    torch.manual_seed(1)
    with pytest.raises(UserError, match=r"mixe[sd]"):
        trace(Leaks(SOURCES[source], share), lengths)


@pytest.mark.parametrize("share", [1e-1, 1e-3])
@pytest.mark.parametrize("seed", range(6))
def test_a_share_of_the_largest_value_is_refused(seed, share):
    torch.manual_seed(seed)
    with pytest.raises(UserError, match=r"mixe[sd]"):
        trace(Leaks(SOURCES["the largest value"], share))


def test_rows_that_depend_only_on_themselves_pass():
    trace(Leaks(lambda h: h, 0.1))
    trace(Leaks(lambda h: h, 0.1), (2, 4, 1, 3, 2, 3))


@pytest.mark.parametrize("count", [*range(2, 10), 31, 32, 33])
def test_some_half_has_the_first_but_not_the_second_of_any_two_rows(count):
    batches = Batches.of(range(count))
    rows, halves = range(count + 2), [set(half) for half in batches.halves()]
    assert all(any(one in half and two not in half for half in halves) for one in rows for two in rows if one != two)


@pytest.mark.parametrize("count", [*range(2, 10), 31, 32, 33])
def test_only_rows_of_a_half_get_other_examples(count):
    batches = Batches.of(range(count))
    replaced_examples = set()
    for half in batches.halves():
        examples = [batches.more[row] for row in half]
        both = {replaced: replaced(batches.more, half), exchanged: exchanged(batches.more, half)}
        for changed in both.values() if len(set(examples)) == len(half) else [both[replaced]]:
            assert [row for row in range(count + 2) if changed[row] != batches.more[row]] == half
        assert sorted(both[exchanged]) == sorted(batches.more)
        replaced_examples |= set(batches.more) - set(both[replaced])
    assert replaced_examples == set(range(count))
