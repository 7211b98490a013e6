"""Stages in sequence match the whole model in losses, gradients, names and key-value caches."""

import copy

import pytest
import torch
from torch import nn

from groupwise.config.schema import LoraConfig
from groupwise.errors import UserError
from groupwise.models.trainable import add_adapters
from groupwise.pipeline.model_parts import FAMILIES
from groupwise.pipeline.split import choose_ranges, cut
from groupwise.torchvision_import import import_torchvision
from groupwise.training.from_config import autocast

import_torchvision()  # before transformers, whose import fails otherwise
WORDS, WIDTH, BLOCKS, LENGTH = 23, 8, 4, 8
LIKE_LLAMA = {"intermediate_size": 12, "num_key_value_heads": 1}
SHAPES = {  # settings in which the families differ
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "gptj": {"rotary_dim": 2},
    "gpt_neox": {"intermediate_size": 16},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 6},
    "llama": LIKE_LLAMA,
    "mistral": LIKE_LLAMA | {"sliding_window": 4},
    "qwen2": LIKE_LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "gemma": LIKE_LLAMA | {"head_dim": 4},
    "gemma2": LIKE_LLAMA | {"head_dim": 4, "sliding_window": 4},
}
EAGER = ("gpt_neo", "gptj", "gemma2")  # support no other attention
TARGETS = {"gpt2": ["c_attn", "c_proj"], "gpt_neox": ["query_key_value"]}


def language_model(kind="gpt2", dropout=0.0, dtype=torch.float64, **shape):
    """A tiny causal model whose norms and biases are not at 1 and 0."""
    import transformers

    shared = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 2, "vocab_size": WORDS}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 16}
    config_class = transformers.CONFIG_MAPPING[kind]
    settings = {config_class.attribute_map.get(k, k): v for k, v in (shared | tokens | SHAPES[kind] | shape).items()}
    config = config_class(**settings)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float) and "layerdrop" not in name:
            setattr(config, name, dropout)
    torch.manual_seed(0)
    attention = "eager" if kind in EAGER else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def with_adapters(kind, **changes):
    model = language_model(kind, **changes)
    dtype = next(model.parameters()).dtype
    model = add_adapters(model, LoraConfig(rank=2, targets=TARGETS.get(kind, ["q_proj", "v_proj"])))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    return model


def untied(kind, **changes):
    model = language_model(kind, **changes)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def attention_alone(kind):
    """Token embedding and head are one frozen parameter; no adapters."""
    model = language_model(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn." in name)
    return model


CASES = {
    **{f"{kind} with adapters": (with_adapters, kind) for kind in FAMILIES},
    **{f"{kind} untied": (untied, kind) for kind in ("gpt2", "opt", "llama", "gemma2")},
    "gpt2 attention": (attention_alone, "gpt2"),
}


def texts():
    """Three examples, right-padded, of which the last is a filler; their labels padded to 4 places."""
    torch.manual_seed(1)
    lengths = torch.tensor([[8], [5], [7]])
    columns = torch.arange(LENGTH).expand(3, LENGTH)
    return torch.randint(2, WORDS, (3, LENGTH)), {
        "attention_mask": (columns < lengths).long(),
        "position_ids": columns,
        "places": torch.tensor([[4, 5, 6, 0], [2, 3, 0, 0], [2, 3, 4, 5]]),
        "labels": torch.tensor([[5, 6, 7, -100], [8, 2, -100, -100], [3, 4, 5, 6]]),
        "weights": torch.tensor([1.0, 1.0, 0.0]),
    }


def expected(model, ids, kwargs, token_loss="mean"):
    """Losses of the whole model, times weights, from all of its logits; and gradients of their sum by name."""
    model.zero_grad()
    logits = model(input_ids=ids, **{k: kwargs[k] for k in ("attention_mask", "position_ids")}, use_cache=False).logits
    losses = []
    for row, places, labels in zip(logits.double().log_softmax(-1), kwargs["places"], kwargs["labels"], strict=True):
        found = torch.stack([-row[p, label] for p, label in zip(places, labels, strict=True) if label >= 0])
        losses.append(found.mean() if token_loss == "mean" else found.sum())
    losses = torch.stack(losses) * kwargs["weights"]
    losses.sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def stages_of(model, count, **options):
    ranges = choose_ranges(model, count)
    return [cut(copy.deepcopy(model), ranges, index, **options) for index in range(count)]


def chained(stages, first, kwargs):
    """Run stages as a pipeline does: each has its own graph, and passes on only activations and their gradients."""
    x, inputs, outputs = first, [], []
    for stage in stages:
        if not stage.first:
            assert x.shape == stage.activation(len(first), first.shape[-1])
            assert x.dtype == stage.dtype and x.is_contiguous()
            x = x.detach().requires_grad_()
        inputs.append(x)
        x = stage(x, **kwargs)
        if not stage.last:
            assert x.shape == stage.activation(len(first), first.shape[-1])
        outputs.append(x)
    gradient = torch.ones_like(x)
    for i in reversed(range(len(stages))):
        outputs[i].backward(gradient)
        gradient = inputs[i].grad
    gradients = {}
    for stage in stages:
        names = stage.names
        gradients |= {names[name]: p.grad for name, p in stage.named_parameters() if p.requires_grad}
    return x.detach(), gradients


def assert_same(found, wanted, names, tolerance=1e-12):
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=tolerance)
    assert set(found[1]) == set(names)
    for name in names:
        torch.testing.assert_close(found[1][name], wanted[1][name], rtol=0, atol=tolerance, msg=name)


COUNTS = {case: (1 + i % 2, 3 + i % 2) for i, case in enumerate(CASES)}
"""A small and a large number of stages for each case, for the fast tests."""


@pytest.mark.parametrize(
    ("case", "counts"),
    [*COUNTS.items(), *(pytest.param(case, tuple(range(1, BLOCKS + 1)), marks=pytest.mark.slow) for case in CASES)],
)
def test_stages_in_sequence_match_the_whole_model(case, counts):
    make, kind = CASES[case]
    model, (ids, kwargs) = make(kind), texts()
    wanted = expected(model, ids, kwargs)
    assert all(float(gradient.abs().max()) > 0 for gradient in wanted[1].values())
    for count in counts:
        assert_same(chained(stages_of(model, count), ids, kwargs), wanted, wanted[1])
    assert_same(chained(stages_of(model, counts[-1], rematerialize=True), ids, kwargs), wanted, wanted[1])


@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16])
def test_stages_in_half_precision_match_the_whole_model_bit_for_bit(frozen):
    precision = autocast("bfloat16", torch.device("cpu"))
    model, (ids, kwargs) = with_adapters("gpt2", dtype=frozen), texts()
    assert stages_of(model, 2)[0].dtype is frozen
    (whole,) = stages_of(model, 1, precision=precision)
    with precision():
        logits = model(input_ids=ids, **{k: kwargs[k] for k in whole.reads}).logits.float()
    torch.testing.assert_close(whole.logits(whole.hidden(ids, **{k: kwargs[k] for k in whole.reads})), logits)
    found = chained(stages_of(model, 3, precision=precision), ids, kwargs)
    wanted = chained([whole], ids, kwargs)
    assert_same(found, wanted, wanted[1], tolerance=0)
    assert found[0].dtype is torch.float32


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_stage_keeps_its_own_key_value_cache(kind):
    from transformers import DynamicCache

    model = with_adapters(kind).eval()
    ids = torch.randint(2, WORDS, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # left-padded, as for generation
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    stages = stages_of(model, 3)
    assert not any(stage.training for stage in stages)
    caches = [DynamicCache(config=stage.config) for stage in stages]
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        for start, stop in ((0, 6), (6, 7), (7, 9)):
            x = ids[:, start:stop]
            for stage, cache in zip(stages, caches, strict=True):
                x = stage.hidden(
                    x,
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                    use_cache=True,
                )
            found = stages[-1].logits(x)
            for row, padding in enumerate((0, 2)):  # transformers' own gemma2 gives NaN beside padding
                kept = slice(max(start, padding), stop)
                torch.testing.assert_close(
                    found[row, kept.start - start :], wanted[row, kept], rtol=0, atol=1e-12, equal_nan=True
                )


def test_a_parameter_outside_all_parts_is_refused():
    model = untied("gpt2")
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match=r"'extra' trains but belongs to no stage"):
        cut(model, ((0, 2), (2, 4)), 0)


def test_a_stage_where_nothing_trains_is_refused():
    model = untied("gpt2").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with pytest.raises(UserError, match=r"Stage 0 has nothing to train"):
        cut(model, ((0, 2), (2, 4)), 1)


def test_an_unknown_model_is_refused():
    import transformers

    config = transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=WORDS)
    with pytest.raises(UserError, match=r"A bloom cannot be split into stages: give a model of type gpt2, .*gemma2"):
        cut(transformers.BloomForCausalLM(config), ((0, 1),), 0)
    with pytest.raises(UserError, match=r"A Linear cannot be split"):
        cut(nn.Linear(2, 2), ((0, 1),), 0)
