"""Microbatches of texts for a pipeline have equal shapes within a batch."""

import numpy as np

from groupwise.config.schema import TrainConfig
from groupwise.tasks import make_task
from tests.tasks.test_text_generation import CPU, config


def test_microbatches_have_the_shape_of_the_longest_text():
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 160}
    summed = TrainConfig(token_loss="sum")
    text = make_task(config(model={"shape": shape}, data={"max_length": 100}, train=summed), CPU)
    feed, tokens = text.feed("train", CPU), text._samples["train"]
    examples = feed.order(np.arange(len(feed)))
    assert (np.diff(tokens.lengths[examples]) <= 0).all()
    for chosen in (examples, examples[-6:]):
        microbatches = feed.microbatches(chosen, size=4)
        longest, targets = int(tokens.lengths[chosen].max()), int(tokens.target_lengths[chosen].max())
        length = min(-(-longest // 8) * 8, 100)
        for microbatch in microbatches:
            shapes = {name: tuple(value.shape) for name, value in microbatch.kwargs.items()}
            places = (4, -(-targets // 8) * 8)
            assert microbatch.first.shape == (4, length) and microbatch.examples == 4
            assert shapes == {
                "attention_mask": (4, length),
                "position_ids": (4, length),
                "places": places,
                "labels": places,
                "weights": (4,),
            }
