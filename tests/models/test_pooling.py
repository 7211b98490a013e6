"""The mean over the tokens: padding counts for nothing, and clipped sums stay those of a loop over examples."""

import pytest
import torch
import torch.nn.functional as F

from groupwise.clipping import attach, per_layer
from groupwise.errors import UserError
from groupwise.models.language import MeanPooled
from groupwise.tasks.samples import ModelInputs
from tests.clipping.traced import clip
from tests.tasks.test_padding import CPU, ROWS, tiny

LABELS = torch.tensor([0, 1, 1])


def test_robertas_head_reads_the_mean_of_what_is_no_padding():
    model = tiny("roberta")
    inputs = ModelInputs(model, 1)(ROWS[1:], CPU)
    states = model.roberta(**inputs).last_hidden_state
    expected = model.classifier(torch.stack([states[0, :2].mean(0), states[1].mean(0)]).unsqueeze(1))
    torch.testing.assert_close(MeanPooled(model)(**inputs).logits, expected)


def test_berts_pooler_reads_the_mean_of_what_is_no_padding():
    model = tiny("bert")
    inputs = ModelInputs(model, 1)(ROWS[1:], CPU)
    states = model.bert(**inputs).last_hidden_state
    means = torch.stack([states[0, :2].mean(0), states[1].mean(0)])
    expected = model.classifier(model.bert.pooler(means.unsqueeze(1)))
    torch.testing.assert_close(MeanPooled(model)(**inputs).logits, expected)


@pytest.mark.parametrize("name", ["roberta", "bert"])
def test_clipped_sums_are_those_of_a_loop(name):
    model = tiny(name)
    pooled, inputs = MeanPooled(model), ModelInputs(model, 1)
    groups, threshold = per_layer(model), 0.05
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row, label in zip(ROWS, LABELS, strict=True):
        model.zero_grad()
        F.cross_entropy(pooled(**inputs([row], CPU)).logits, label[None]).backward()
        for group in groups:
            members = [n for n in expected if n.rpartition(".")[0] in group.layers]
            norm = sum(model.get_parameter(n).grad.square().sum() for n in members).sqrt()
            for n in members:
                expected[n] += model.get_parameter(n).grad * min(1.0, float(threshold / norm))
    model.zero_grad()

    def losses_of(rows):
        logits = pooled(**inputs([ROWS[i] for i in rows], CPU)).logits
        return F.cross_entropy(logits, LABELS[list(rows)], reduction="none")

    with attach(model, groups, thresholds=threshold) as engine:
        clip(engine, losses_of, range(len(ROWS)))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


def test_other_heads_are_refused():
    with pytest.raises(UserError, match="has another"):
        MeanPooled(tiny("gpt2"))
