"""Texts as a family of tokenisers frames them: what begins, parts and ends them."""

import pytest

from groupwise.tasks import make_task
from tests.tasks.decoders import CPU, folder_of, settings

FRAMES = {
    "llama": ("<|begin_of_text|>{}\n{}<|end_of_text|>", "<|begin_of_text|>{} {}<|end_of_text|>"),
    "qwen2": ("{}\n{}<|endoftext|>", "{} {}<|endoftext|>"),
    "gemma": ("<bos>{}\n{}<eos>", "<bos>{} {}<eos>"),
}


@pytest.mark.parametrize("family", FRAMES)
def test_a_text_begins_and_ends_as_the_tokeniser_has_it(folders, family):
    for task, frame in zip(("e2e", "samsum"), FRAMES[family], strict=True):
        made = make_task(settings(folder_of(folders, family), task, data={"max_length": 300}), CPU)
        source, target = made._data.train[0]
        row, start = made._samples["train"].tokens[0], made._samples["train"].starts[0]
        assert made.tokenizer.decode(row) == frame.format(source, target)
        assert made.tokenizer.decode(row[start:]).lstrip() == f"{target}{made.tokenizer.eos_token}"
        assert made._encoder.prompts([source], 300) == [row[:start].tolist()]
        short = make_task(settings(folder_of(folders, family), task, data={"max_length": 60}), CPU)._samples["train"]
        assert short.lengths.max() == 60 and short.cut > 0
        assert all(short.tokens[i][0] == row[0] for i in range(len(short))) or family == "qwen2"
