"""Texts of random tokens, whose gradient norms public thresholds follow: framed and cut as any, and of no example."""

import pytest
import torch

from groupwise.config.schema import DataConfig, ModelConfig, RunConfig
from groupwise.tasks import make_task

CPU = torch.device("cpu")
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 130,
    "type_vocab_size": 1,
}
DECODER = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 200}
TASKS = {"sst2": "roberta", "qnli": "roberta", "mnli": "roberta", "e2e": "gpt2", "samsum": "gpt2"}


def make(name: str, examples: int = 20, max_length: int = 96):
    """A task with the same initial weights, whatever its data."""
    torch.manual_seed(3)
    family = TASKS[name]
    model = ModelConfig(
        name=f"{family}_tiny",
        source=f"pretrained/{family}_mini",
        fresh=True,
        architecture=family,
        shape=ENCODER if family == "roberta" else DECODER,
        dropout=0.0,
        attention_dropout=0.0,
    )
    data = DataConfig(name="synthetic", train_limit=examples, max_length=max_length)
    return make_task(RunConfig(task=name, model=model, data=data), CPU)


def public_losses(task, count: int = 9):
    torch.manual_seed(5)
    return task.public_losses(count)


@pytest.mark.parametrize("name", TASKS)
def test_their_losses_are_a_function_of_the_weights_and_the_generator_alone(name):
    few, many = make(name, 20), make(name, 40)
    found = public_losses(few)
    assert found.shape == (9,) and len({*found.tolist()}) == 9
    found.sum().backward()
    assert all(bool(p.grad.any()) for n, p in few.model.named_parameters() if "embeddings" not in n and "key" not in n)
    many.model.load_state_dict(few.model.state_dict())
    assert torch.equal(public_losses(many), found)
    torch.manual_seed(6)
    assert not torch.equal(few.public_losses(9), found)


@pytest.mark.parametrize("name", ["sst2", "qnli", "e2e"])
def test_they_are_framed_and_cut_like_the_tasks_own(name):
    task, seen = make(name, max_length=24), []
    task.model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
    task.losses(range(9))
    public_losses(task)
    own, made_up = seen
    assert made_up.shape[1] == 24  # two or one of 32 random tokens, cut to data.max_length
    if TASKS[name] == "roberta":
        assert torch.equal(made_up[:, 0], own[:, 0])  # the class is read off a text's first token
    else:
        end = task.tokenizer.eos_token_id
        assert bool((made_up == end).any(1).all())  # which stands between source and target


def test_special_tokens_are_not_drawn():
    task = make("e2e")
    torch.manual_seed(0)
    drawn = task.made_up_texts(50)
    assert len({*drawn}) == 50 and not any(task.tokenizer.eos_token in text for text in drawn)
