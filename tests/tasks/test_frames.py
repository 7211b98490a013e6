"""Texts as a family of tokenisers frames them: what begins, parts and ends them; turns of a chat; generation's end."""

import pytest
import torch

from groupwise.config.schema import GenerateConfig
from groupwise.errors import UserError
from groupwise.tasks import make_task
from groupwise.tasks.samples import chat_frame
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
        assert short.tokens.lengths.max() == 60 and short.cut > 0
        assert all(short.tokens[i][0] == row[0] for i in range(len(short))) or family == "qwen2"


@pytest.mark.parametrize("family", FRAMES)
def test_a_chat_is_what_the_template_makes_of_it_up_to_the_end_of_the_answers_turn(folders, family):
    made = make_task(settings(folder_of(folders, family), "samsum", data={"chat": True, "max_length": 300}), CPU)
    source, target = made._data.train[0]
    question = source.removesuffix("\nTL;DR")
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": target}]
    whole = made.tokenizer.apply_chat_template(turns, return_dict=False)
    row, start = made._samples["train"].tokens[0], int(made._samples["train"].starts[0])
    assert row.tolist() == whole[: len(row)] and len(whole) - len(row) <= 1
    prompt = made.tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert made._encoder.prompts([source], 300) == [prompt] == [row[:start].tolist()]
    turn = {"llama": "<|eot_id|>", "qwen2": "<|im_end|>", "gemma": "<end_of_turn>"}[family]
    assert made.tokenizer.decode(row[start:]) == f"{target}{turn}"
    assert made.tokenizer.decode(made._encoder.ends) == f"{turn}{made.tokenizer.eos_token}"


def test_what_a_template_writes_before_an_answer_is_in_every_prompt_and_its_day_is_always_the_same(folders):
    tokenizer = make_task(settings(folder_of(folders, "qwen2")), CPU).tokenizer
    tokenizer.chat_template = (
        "{{ strftime_now('%d %b %Y') }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>\n"
        "{% endfor %}"
    )
    frame = chat_frame(tokenizer, "")
    assert tokenizer.decode(frame.begin) == "26 Jul 2024<|im_start|>user\n"
    assert tokenizer.decode(frame.ending) == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "has no chat template"),
        ("{% for message in messages %}{{ message.content | upper }}{% endfor %}", "changes the texts"),
        ("{{ raise_exception('Only one turn!') }}", r"cannot format a question and an answer \(Only one turn!\)"),
    ],
)
def test_a_tokeniser_that_has_no_turns_for_it(folders, template, told):
    tokenizer = make_task(settings(folder_of(folders, "qwen2")), CPU).tokenizer
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=told):
        chat_frame(tokenizer, "")


def test_generation_ends_with_the_turn(folders):
    """A model that has learned one answer stops there, though its tokeniser's end of text never came."""
    config = settings(folder_of(folders, "gemma"), data={"chat": True, "train_limit": 1})
    config.eval.generate = GenerateConfig(beams=2, max_new_tokens=60, limit=1)
    task = make_task(config, CPU)
    source, target = task._data.train[0]
    task._data.test[0] = type(task._data.test[0])(source, (target,))
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        task.losses_of([0]).sum().backward()
        optimizer.step()
    assert task.evaluate("test", 50, limit=1, final=True)["bleu"] == pytest.approx(100)
    assert task.outputs()["test"][0]["output"] == target
