"""Attention that runs operation by operation is torch's: outputs, weights and every gradient, to 1e-12 in float64."""

from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping.products import attention
from groupwise.errors import UserError
from tests.combinations import pairs_fast

B, L, S, E, HEADS = 3, 4, 5, 6, 2
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
PADDED = torch.arange(L) >= torch.tensor([[2], [4], [3]])


def expressed(module: nn.MultiheadAttention, *args, **kwargs):
    """The module's forward with attention in plain operations."""
    with patch.object(F, "multi_head_attention_forward", attention):
        return module(*args, **kwargs)


def same(module: nn.MultiheadAttention, inputs: list[Tensor], seed: int = 0, **options) -> None:
    """Outputs, weights and gradients of the module's own forward are those of the re-expressed one."""
    slopes, sides = None, []
    leaves = [*module.parameters(), *{id(x): x for x in inputs}.values()]
    for run in (module, partial(expressed, module)):
        torch.manual_seed(seed)
        results = [part for part in run(*inputs, **options) if part is not None]
        assert len(results) == 1 + options.get("need_weights", True)
        slopes = slopes or [torch.randn_like(part) for part in results]
        loss = sum((part * slope).sum() for part, slope in zip(results, slopes, strict=True))
        sides.append([*results, *torch.autograd.grad(loss, leaves)])
    for own, other in zip(*sides, strict=True):
        torch.testing.assert_close(other, own, rtol=1e-12, atol=1e-12, equal_nan=True)


def inputs_of(module: nn.MultiheadAttention, which: str = "qqq", length: int = S) -> list[Tensor]:
    """Query, key and value; equal letters are one tensor."""
    sizes = {"q": (L, E), "k": (length, module.kdim), "v": (length, module.vdim)}
    made: dict[str, Tensor] = {}
    for letter in which:
        shape = (B, *sizes[letter]) if module.batch_first else (sizes[letter][0], B, sizes[letter][1])
        made.setdefault(letter, torch.randn(shape, requires_grad=True))
    return [made[letter] for letter in which]


def lively(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """Biases that are not zero."""
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("which", "sizes"),
    [*((which, {}) for which in ("qqq", "qkk", "qkv", "qqv", "qkq")), ("qkv", {"kdim": 4, "vdim": 7})],
)
def test_each_way_to_share_inputs(double, which, sizes, bias, batch_first, need_weights):
    module = lively(nn.MultiheadAttention(E, HEADS, bias=bias, batch_first=batch_first, **sizes))
    length = L if which in ("qqv", "qkq") else S
    same(module, inputs_of(module, which, length), need_weights=need_weights)


MASKS = {
    "float_2d": {"attn_mask": CAUSAL},
    "bool_2d": {"attn_mask": CAUSAL < 0},
    "float_3d": {"attn_mask": torch.randn(B * HEADS, L, L, dtype=torch.float64)},
    "bool_3d": {"attn_mask": (torch.arange(L) > torch.arange(B * HEADS * L).view(-1, L, 1) % 4).expand(-1, L, -1)},
    "padding": {"key_padding_mask": PADDED},
    "float_padding": {"key_padding_mask": torch.where(PADDED, -1e3, 0.5).double()},
    "both": {"attn_mask": CAUSAL < 0, "key_padding_mask": PADDED},
    "both_3d": {"attn_mask": torch.randn(B * HEADS, L, L).double(), "key_padding_mask": PADDED.double()},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal_padding": {"attn_mask": CAUSAL < 0, "is_causal": True, "key_padding_mask": PADDED},
    "causal_by_a_mask_that_is_not": {"attn_mask": torch.ones(L, L).double(), "is_causal": True},
    "nothing_to_attend_to": {"key_padding_mask": PADDED | torch.tensor([[False], [True], [False]])},
    "weights_of_each_head": {"average_attn_weights": False},
}
APPENDED = {
    "nothing": {},
    "zeros": {"add_zero_attn": True},
    "a bias": {"add_bias_kv": True},
    "both": {"add_zero_attn": True, "add_bias_kv": True},
}


@pytest.mark.parametrize(
    ("mask", "need_weights", "appended"),
    pairs_fast(product(MASKS, [True, False], APPENDED)),
)
def test_masks(double, mask, need_weights, appended):
    for batch_first in (True, False):
        module = lively(nn.MultiheadAttention(E, HEADS, batch_first=batch_first, **APPENDED[appended]))
        same(module, inputs_of(module), need_weights=need_weights, **MASKS[mask])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_the_same_masks_and_only_in_training(double, training, need_weights):
    module = lively(nn.MultiheadAttention(E, HEADS, dropout=0.5, batch_first=True)).train(training)
    for seed in range(3):
        same(module, inputs_of(module), seed=seed, need_weights=need_weights, **MASKS["both"])
    x = inputs_of(module)
    first, second = (expressed(module, *x, need_weights=need_weights)[0] for _ in range(2))
    assert torch.equal(first, second) != training


@pytest.mark.parametrize("lacking", ["query", "key"])
def test_what_has_no_batch_is_refused(lacking):
    module = nn.MultiheadAttention(E, HEADS)
    inputs = {"query": torch.ones(L, B, E), "key": torch.ones(S, B, E), "value": torch.ones(S, B, E)}
    inputs[lacking] = torch.ones(L, E)
    with pytest.raises((UserError, AssertionError), match="batch"):
        expressed(module, **inputs)


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast(need_weights):
    torch.manual_seed(0)
    module = lively(nn.MultiheadAttention(E, HEADS, batch_first=True))
    x = torch.randn(B, L, E)
    options = {"attn_mask": CAUSAL.float(), "key_padding_mask": PADDED, "need_weights": need_weights}
    exact = module(x, x, x, **{**options, "key_padding_mask": PADDED.float().masked_fill(PADDED, -torch.inf)})[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = expressed(module, x, x, x, **options)[0]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
