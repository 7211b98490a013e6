"""Mean pooling over tokens ignores padding, and clipped sums match a loop over examples."""

import pytest
import torch
import torch.nn.functional as F

from groupwise.clipping import attach, per_layer
from groupwise.errors import UserError
from groupwise.models.language import MeanPooled
from groupwise.tasks.samples import ModelInputs
from tests.clipping.alone import assert_exact
from tests.tasks.test_padding import CPU, ROWS, tiny

LABELS = torch.tensor([0, 1, 1])


@pytest.mark.parametrize("name", ["roberta", "bert"])
def test_head_reads_the_mean_over_tokens_without_padding(name):
    model = tiny(name)
    inputs = ModelInputs(model, 1)(ROWS[1:], CPU)
    states = getattr(model, name)(**inputs).last_hidden_state
    means = torch.stack([states[0, :2].mean(0), states[1].mean(0)]).unsqueeze(1)
    expected = model.classifier(means if name == "roberta" else model.bert.pooler(means))
    torch.testing.assert_close(MeanPooled(model)(**inputs).logits, expected)


@pytest.mark.parametrize("name", ["roberta", "bert"])
def test_clipped_sums_match_a_loop_over_examples(name):
    model = tiny(name)
    pooled, inputs = MeanPooled(model), ModelInputs(model, 1)

    def losses_of(rows):
        logits = pooled(**inputs([ROWS[i] for i in rows], CPU)).logits
        return F.cross_entropy(logits, LABELS[list(rows)], reduction="none")

    with attach(model, per_layer(model), 1.0) as engine:
        assert_exact(engine, losses_of, range(len(ROWS)))


def test_other_heads_are_refused():
    with pytest.raises(UserError, match="has no such head"):
        MeanPooled(tiny("gpt2"))
    with pytest.raises(UserError, match="gets one token alone"):
        MeanPooled(tiny("albert"))(**ModelInputs(tiny("albert"), 1)(ROWS, CPU))
