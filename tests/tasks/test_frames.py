"""The tokens that each family of tokenisers puts at the start, between source and target, and at the end."""

import pytest

from groupwise.tasks import make_task
from tests.tasks.decoders import CPU, folder_of, settings

FRAMES = {
    "llama": ("<|begin_of_text|>{}\n{}<|end_of_text|>", "<|begin_of_text|>{} {}<|end_of_text|>"),
    "qwen2": ("{}\n{}<|endoftext|>", "{} {}<|endoftext|>"),
    "gemma": ("<bos>{}\n{}<eos>", "<bos>{} {}<eos>"),
}


@pytest.mark.parametrize("family", FRAMES)
def test_text_has_the_start_separator_and_end_of_its_tokeniser(folders, family):
    for task, frame in zip(("e2e", "samsum"), FRAMES[family], strict=True):
        built = make_task(settings(folder_of(folders, family), task, data={"max_length": 300}), CPU)
        source, target = built._data.train[0]
        row, start = built._samples["train"].tokens[0], built._samples["train"].starts[0]
        assert built.tokenizer.decode(row) == frame.format(source, target)
        assert built.tokenizer.decode(row[start:]).lstrip() == f"{target}{built.tokenizer.eos_token}"
        assert built._encoder.prompts([source], 300) == [row[:start].tolist()]
        short = make_task(settings(folder_of(folders, family), task, data={"max_length": 60}), CPU)._samples["train"]
        assert short.lengths.max() == 60 and short.cut > 0
        assert all(short.tokens[i][0] == row[0] for i in range(len(short))) or family == "qwen2"
