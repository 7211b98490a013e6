"""Gram matrices in chunks of examples give the same numbers, and slack covers the longest sum."""

import pytest
import torch

from groupwise.clipping import attach, flat, gram, norm_terms, per_layer, shared_parameters
from groupwise.clipping.precision import rounding_slack
from tests.clipping.conftest import BATCH, make_case
from tests.clipping.traced import clip

CHUNKED = {
    "gram": (gram, "linear_3d", {"formula": "gram"}, 2 * 9),
    "tied, materialised": (shared_parameters, "tied_conv1d", {}, 2 * 48),
    "tied, one at a time": (shared_parameters, "tied_conv1d", {}, 1),
}


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_chunks_do_not_change_norms_and_sums(double, monkeypatch, name, make_partition):
    module, case_name, options, floats = CHUNKED[name]
    case = make_case(case_name)
    found = []
    for limit in (None, floats):
        if limit is not None:
            monkeypatch.setattr(module, "CHUNK_FLOATS", limit)
        case.model.zero_grad()
        with attach(case.model, make_partition(case.model), 0.3, **options) as engine:
            clip(engine, case.losses, range(BATCH))
            found.append([engine.per_example_norms, *(p.grad.clone() for p in case.model.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("floats", "sizes"), [(18, [2, 2, 1]), (17, [1] * 5), (10**6, [5])])
def test_gram_matrices_are_computed_in_chunks_of_examples(monkeypatch, floats, sizes):
    monkeypatch.setattr(gram, "CHUNK_FLOATS", floats)
    recorded, original = [], gram.GramTerms
    monkeypatch.setattr(gram, "GramTerms", lambda xx, *rest: recorded.append(len(xx)) or original(xx, *rest))
    x, g = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, 6, dtype=torch.float64)
    for bias in (True, False):
        recorded.clear()
        squares = gram.gram_norms(x, g, bias)
        truth = (g.mT @ x).square().sum((1, 2)) + (g.sum(1).square().sum(1) if bias else 0)
        torch.testing.assert_close(squares, truth, rtol=1e-12, atol=0)
        assert recorded == sizes


@pytest.mark.parametrize(("terms", "longest"), [((4, 5, 6), 6), ((7, 5, 6), 7), ((4, 8, 6), 8)])
def test_slack_uses_the_number_of_terms_of_the_longest_sum(monkeypatch, terms, longest):
    rows, d, p = terms
    recorded = []
    original = norm_terms.slack_of
    monkeypatch.setattr(norm_terms, "slack_of", lambda n, *rest: recorded.append(n) or original(n, *rest))
    x, g = torch.randn(2, rows, d), torch.randn(2, rows, p)
    gram.gram_norms(x, g, True)
    assert recorded == [longest]


def test_slack_uses_magnitudes_before_cancellation():
    """Two positions cancel exactly: ‖GᵀX‖ = 0, but its terms are not 0."""
    x, g = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]]), torch.tensor([[[2.0], [-2.0]]])
    for bias, size in ((False, 2 * 5 * 2), (True, 2 * 26**0.5 * 2)):
        squares = gram.gram_norms(x, g, bias)
        assert squares.item() == pytest.approx(rounding_slack(torch.tensor(float(size) ** 2), 2).item(), rel=1e-5)
