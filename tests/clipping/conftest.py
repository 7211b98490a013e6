"""Small models, one per layer type and unusual use, each with a batch of six examples in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from groupwise.clipping import WSConv2d

BATCH = 6


@dataclass
class Case:
    """A model, its batch, and per-example losses of any subset of it."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def losses(self, examples=slice(None)) -> Tensor:
        out = self.model(self.inputs[examples])
        return F.mse_loss(out.flatten(1), self.targets[examples], reduction="none").sum(1)

    def loss_of(self, example: int) -> Tensor:
        return self.losses([example])[0]


class HFConv1D(nn.Module):
    """Stands in for `transformers.pytorch_utils.Conv1D`, which the engine recognises by its name."""

    def __init__(self, p: int, d: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d, p) / 3), nn.Parameter(torch.randn(p))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


HFConv1D.__name__, HFConv1D.__module__ = "Conv1D", "transformers.pytorch_utils"


class Scale(nn.Module):
    """A module with parameters of its own, for which there is no rule."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)
        self.inner = nn.Linear(size, size)

    def forward(self, x: Tensor, *, power: int = 2) -> Tensor:
        return torch.tanh(self.inner(x) * self.scale**power)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


class LastOutput(nn.Module):
    """The last output (B, 2) of an LSTM on inputs (B, T, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


class Checkpointed(nn.Sequential):
    """Layers under activation checkpointing: they run again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Lambda(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class LlamaNorm(nn.Module):
    """RMSNorm as in transformers, except that float64 inputs stay float64."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(size) + 0.5), 0.01

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


def twice(layer: nn.Module) -> nn.Module:
    """One layer used twice in one forward."""
    return nn.Sequential(layer, nn.Tanh(), layer)


class TiedLanguageModel(nn.Module):
    """Embedding and output layer share their weight; positions have an embedding of their own."""

    def __init__(self, head_bias: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 6), nn.Embedding(7, 6)
        self.body, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=head_bias)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        x = self.wte(ids) + self.wpe(positions)
        return self.head(self.norm(x + torch.tanh(self.body(x))))


class TiedConv1D(nn.Module):
    """Two HF layers share a weight, and so do two convolutions: their joint norms are materialised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = HFConv1D(6, 6), HFConv1D(6, 6)
        self.b.weight = self.a.weight
        self.c, self.d = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.d.weight = self.c.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


class Residual(nn.Module):
    """A residual block of a norm and a linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


def _freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def _fixed_norm(layer: nn.Module) -> nn.Module:
    """Spectral normalisation with fixed singular vectors, scaled so that the norm is not exact."""
    layer = spectral_norm(layer)
    norm = layer.parametrizations.weight[0].eval()
    norm._u.mul_(0.9)
    return layer


def _ws_conv_with_flat_filter() -> nn.Module:
    """A weight-standardised convolution with one filter of so little variance that eps determines its scale."""
    conv = WSConv2d(3, 4, 3, gain=True)
    with torch.no_grad():
        conv.weight[1] = 0.3 + 1e-4 * torch.randn_like(conv.weight[1])
        conv.gain.uniform_(0.5, 2)
    return conv


class StdConv2d(nn.Conv2d):
    """As in timm: a convolution with its own forward, for which there is no rule."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, self.gain, training=True, momentum=0.0, eps=1e-2)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, *shape)


def _ids(vocabulary: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, vocabulary, (BATCH, *shape))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear_2d": (lambda: nn.Linear(5, 4), _floats(5)),
    "linear_3d": (lambda: nn.Linear(5, 4), _floats(3, 5)),
    "linear_4d": (lambda: nn.Linear(5, 4), _floats(2, 3, 5)),
    "linear_one_input": (lambda: nn.Linear(1, 2), _floats(3, 1)),
    "linear_one_output": (lambda: nn.Linear(2, 1), _floats(1, 2)),
    "linear_no_bias": (lambda: nn.Linear(5, 4, bias=False), _floats(3, 5)),
    "mlp_inplace": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)), _floats(5)),
    "hf_conv1d_2d": (lambda: HFConv1D(4, 5), _floats(5)),
    "hf_conv1d_3d": (lambda: nn.Sequential(HFConv1D(4, 5), nn.Tanh(), HFConv1D(3, 4)), _floats(3, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), _floats(3, 9)),
    "conv1d_grouped_dilated": (lambda: nn.Conv1d(4, 6, 2, dilation=2, groups=2), _floats(4, 9)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, 2)),
        _floats(3, 6, 7),
    ),
    "conv2d_no_bias": (lambda: nn.Conv2d(3, 4, (3, 2), bias=False, padding=(1, 0)), _floats(3, 5, 6)),
    "conv2d_depthwise": (lambda: nn.Conv2d(4, 8, 3, stride=(2, 1), padding=2, dilation=2, groups=4), _floats(4, 7, 6)),
    "conv2d_many_channels": (lambda: nn.Conv2d(32, 2, (3, 2), (1, 2), (1, 0)), _floats(32, 5, 6)),  # XXᵀ over pixels
    "conv2d_one_pixel": (lambda: nn.Conv2d(3, 4, 1, padding=(1, 0)), _floats(3, 4, 5)),
    "conv2d_same": (lambda: nn.Conv2d(3, 4, 4, padding="same"), _floats(3, 5, 6)),
    "conv2d_circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), _floats(3, 5, 6)),
    "conv2d_valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), _floats(3, 5, 6)),
    "conv2d_skipped_inputs": (lambda: nn.Conv2d(4, 5, 2, stride=3), _floats(4, 7, 7)),
    "conv2d_taps_in_padding_only": (lambda: nn.Conv2d(4, 5, 5, padding=4, dilation=(3, 1)), _floats(4, 5, 3)),
    "conv2d_more_padding_than_input": (lambda: nn.Conv2d(6, 5, (4, 2), padding=(3, 1)), _floats(6, 1, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1), padding=1), _floats(2, 3, 4, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, 2, 1, output_padding=1), _floats(3, 5)),
    "conv_transpose2d": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, bias=False)),
        _floats(3, 3, 4),
    ),
    "conv_transpose2d_grouped": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (1, 3), (2, 1), (1, 2), groups=2, dilation=(2, 1)),
        _floats(4, 4, 3),
    ),
    "conv1d_depthwise": (lambda: nn.Conv1d(3, 3, 4, stride=3, padding=1, groups=3), _floats(3, 9)),
    "conv3d_depthwise": (lambda: nn.Conv3d(2, 2, 2, dilation=(2, 1, 1), groups=2, bias=False), _floats(2, 4, 4, 3)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, (1, 2, 1), 1), _floats(2, 3, 3, 2)),
    "ws_conv": (lambda: nn.Sequential(WSConv2d(3, 4, 3, padding=1), nn.ReLU(), WSConv2d(4, 4, 3)), _floats(3, 6, 6)),
    "ws_conv_gain": (_ws_conv_with_flat_filter, _floats(3, 5, 5)),
    "ws_conv_grouped": (lambda: WSConv2d(4, 6, 3, groups=2, stride=2, gain=True, bias=False), _floats(4, 6, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)), _ids(5, 8)),
    "embedding_padded": (lambda: nn.Sequential(nn.Embedding(5, 4, padding_idx=2), nn.Tanh()), _ids(5, 8)),
    "embedding_1d": (lambda: nn.Embedding(5, 4), _ids(5)),
    "embedding_3d": (lambda: nn.Embedding(5, 4), _ids(5, 2, 3)),
    "layer_norm_2d": (lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6)), _floats(5)),
    "layer_norm_3d": (lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, bias=False)), _floats(3, 5)),
    "layer_norm_two_axes": (lambda: nn.LayerNorm((3, 5)), _floats(2, 3, 5)),
    "rms_norm_2d": (lambda: nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6)), _floats(5)),
    "rms_norm_two_axes": (lambda: nn.Sequential(nn.Linear(5, 5), nn.RMSNorm((3, 5), eps=0.1)), _floats(2, 3, 5)),
    "fallback_rms_norm_llama": (lambda: nn.Sequential(LlamaNorm(5), nn.Linear(5, 6), LlamaNorm(6)), _floats(3, 5)),
    "group_norm_2d": (lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6)), _floats(5)),
    "group_norm_4d": (lambda: nn.Sequential(nn.Conv2d(3, 6, 2), nn.GroupNorm(3, 6)), _floats(3, 4, 4)),
    "group_norm_channels_last": (  # the gradient of the mean is an expanded tensor, in neither layout
        lambda: nn.Sequential(nn.Conv2d(3, 6, 2), nn.GroupNorm(3, 6), nn.AdaptiveAvgPool2d(1)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        ),
        _floats(3, 4, 4),
    ),
    "fallback_instance_norm_1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 3, 2)),
        _floats(3, 6),
    ),
    "fallback_instance_norm_2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.InstanceNorm2d(4, eps=0.1, affine=True), nn.Tanh()),
        _floats(3, 5, 4),
    ),
    "fallback_instance_norm_inplace": (
        lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True), Lambda(lambda x: x.mul_(2)), nn.ReLU(inplace=True)),
        _floats(3, 5),
    ),
    "fallback_own_parameter": (lambda: nn.Sequential(nn.Linear(5, 4), Scale(4)), _floats(3, 5)),
    "fallback_attention": (Attention, _floats(3, 8)),
    "fallback_recurrent_reused": (Recurrent, _floats(3, 5)),
    "parametrized": (lambda: weight_norm(nn.ConvTranspose1d(3, 4, 2)), _floats(3, 5)),
    "parametrized_conv": (lambda: weight_norm(nn.Conv2d(3, 4, 2, stride=2, padding=1)), _floats(3, 5, 4)),
    "std_conv": (lambda: StdConv2d(3, 4, 3, padding=1, stride=2), _floats(3, 5, 6)),
    "parametrized_linear": (
        lambda: nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        _floats(3, 5),
    ),
    "fallback_spectral_norm": (
        lambda: nn.Sequential(_fixed_norm(nn.Linear(5, 4)), nn.Tanh(), _fixed_norm(nn.Linear(4, 3, bias=False))),
        _floats(5),
    ),
    "blocks": (lambda: nn.Sequential(nn.Linear(5, 4), Residual(4), Residual(4), nn.Linear(4, 2)), _floats(3, 5)),
    "reused_linear": (lambda: twice(nn.Linear(5, 5)), _floats(3, 5)),
    "reused_conv": (lambda: twice(nn.Conv2d(3, 3, 3, padding=1)), _floats(3, 5, 5)),
    "reused_conv_transpose": (lambda: twice(nn.ConvTranspose2d(3, 3, 3, padding=1)), _floats(3, 4, 4)),
    "reused_ws_conv": (lambda: twice(WSConv2d(3, 3, 3, padding=1, gain=True)), _floats(3, 5, 5)),
    "reused_norm": (lambda: twice(nn.LayerNorm(5)), _floats(3, 5)),
    "reused_rms_norm": (lambda: twice(nn.RMSNorm(5)), _floats(3, 5)),
    "reused_group_norm": (lambda: twice(nn.GroupNorm(1, 3)), _floats(3, 5)),
    "tied": (TiedLanguageModel, _ids(11, 7)),
    "tied_head_bias": (lambda: TiedLanguageModel(head_bias=True), _ids(11, 7)),
    "tied_conv1d": (TiedConv1D, _floats(4, 6)),
    "frozen_weight": (
        lambda: _freeze(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), "0.weight"),
        _floats(3, 5),
    ),
    "frozen_bias": (lambda: _freeze(nn.Linear(5, 4), "bias"), _floats(3, 5)),
    "reused_frozen_bias": (lambda: _freeze(twice(nn.Linear(5, 5)), "0.bias"), _floats(3, 5)),
    "frozen_layer": (
        lambda: _freeze(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), "0.weight", "0.bias"),
        _floats(5),
    ),
    "frozen_conv_weight": (lambda: _freeze(nn.Conv2d(3, 4, 3), "weight"), _floats(3, 5, 5)),
    "frozen_transposed_weight": (lambda: _freeze(nn.ConvTranspose2d(3, 4, 3), "weight"), _floats(3, 4, 4)),
    "frozen_transposed_bias": (lambda: _freeze(nn.ConvTranspose2d(3, 4, 3), "bias"), _floats(3, 4, 4)),
    "frozen_ws_weight": (lambda: _freeze(WSConv2d(3, 4, 3, gain=True), "weight"), _floats(3, 5, 5)),
    "frozen_ws_bias_and_gain": (lambda: _freeze(WSConv2d(3, 4, 3, gain=True), "bias", "gain"), _floats(3, 5, 5)),
    "frozen_ws_bias": (lambda: _freeze(_ws_conv_with_flat_filter(), "bias"), _floats(3, 5, 5)),
    "frozen_norm_weight": (lambda: _freeze(nn.GroupNorm(2, 4), "weight"), _floats(4, 3)),
}


@pytest.fixture
def double():
    """float64 by default, and a fixed seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` records a stack trace per device type: slow
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=CASES)
def case(request, double) -> Case:
    """Every layer type and unusual use in turn."""
    return make_case(request.param)


def make_case(name: str) -> Case:
    make_model, make_inputs = CASES[name]
    model, inputs = make_model(), make_inputs()
    with torch.no_grad():
        outputs = model(inputs).flatten(1)
    return Case(name, model, inputs, outputs + torch.randn_like(outputs) * torch.logspace(-1, 1, BATCH)[:, None])
