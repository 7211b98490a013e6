"""The check before training raises no false alarm: ordinary models in float32, with dropout on, pass it."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, per_layer, verify
from groupwise.config.schema import LoraConfig
from groupwise.models.image_networks import WideResNet
from tests.clipping.conftest import Checkpointed, Lambda
from tests.clipping.modes import FEW, attached
from tests.clipping.test_language_models import CAUSAL, CLASSIFIERS, LORA, Case, make_case

Losses = Callable[[Sequence[int]], Tensor]
LENGTHS = (9, 4, 7, 2, 6, 5, 9, 3)
EXAMPLES = (0, 3, 7, 4, 1)
"""The longest text is first, as in the library's tasks."""


class Residual(nn.Module):
    """Stochastic depth: each example keeps the residual branch with probability `survival`."""

    def __init__(self, inner: nn.Module, survival: float) -> None:
        super().__init__()
        self.inner, self.survival = inner, survival

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(len(x), *[1] * (x.dim() - 1)) < self.survival if self.training else self.survival
        return x + self.inner(x) * keep


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.mix, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.out(attended.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for t in range(x.shape[1]):
            h = F.dropout(self.cell(x[:, t], h), 0.1, self.training)
        return self.out(h)


def pooled(x: Tensor) -> Tensor:
    """The mean over positions."""
    return x.mean(1)


def noised(x: Tensor) -> Tensor:
    """Add Gaussian noise, independent for each example."""
    return x + 0.1 * torch.randn(x.shape)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(42, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 7)), nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout2d(0.2),
        nn.Conv2d(8, 8, 3), nn.RReLU(), nn.Flatten(), nn.AlphaDropout(0.1), nn.Linear(48, 3),
    )  # fmt: skip


def transformer() -> nn.Module:
    feed = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 6))
    attend = nn.Sequential(nn.LayerNorm(6), Attention(6, 2), nn.Dropout(0.1))
    return nn.Sequential(Residual(attend, 0.9), Residual(feed, 0.8), nn.LayerNorm(6), Lambda(pooled), nn.Linear(6, 3))


def fallback() -> nn.Module:
    scale = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    return nn.Sequential(scale, nn.Tanh(), Lambda(pooled), Lambda(noised), nn.Linear(6, 3))


def frozen_backbone() -> nn.Module:
    body = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)).requires_grad_(False).eval()
    return nn.Sequential(body, nn.Tanh(), Lambda(pooled), nn.Dropout(0.1), nn.Linear(6, 3))


def on_rows(make: Callable[[], nn.Module]) -> tuple[nn.Module, Losses]:
    """Real inputs (7, 6) per example, three classes."""
    model, x, y = make(), torch.randn(len(LENGTHS), 7, 6), torch.arange(len(LENGTHS)) % 3
    return model, lambda examples: F.cross_entropy(model(x[list(examples)]), y[list(examples)], reduction="none")


def on_images() -> tuple[nn.Module, Losses]:
    model, x, y = WideResNet(depth=10, width=1, norm_groups=4), torch.randn(8, 3, 8, 8), torch.arange(8)
    return model, lambda examples: F.cross_entropy(model(x[list(examples)]), y[list(examples)], reduction="none")


def on_text(name: str, **changes: object) -> tuple[nn.Module, Losses]:
    """Rows of unequal length, padded to the longest of their batch; the model has one block, to be fast."""
    shape = (CAUSAL | CLASSIFIERS)[name].shape
    shallow = {**shape, **{key: 1 for key in ("n_layer", "n_layers", "num_hidden_layers") if key in shape}}
    case = make_case(name, **{"dropout": 0.1, "attention_dropout": 0.1, "shape": shallow, **changes})
    model = case.model.float().train()
    rows = [torch.randint(5, 60, (length,)) for length in LENGTHS]
    classes = None if case.classes is None else torch.arange(len(rows)) % 3

    return model, Case(model, rows, [1] * len(rows), classes, case.first).losses


ADAPTERS = LoraConfig(rank=3, alpha=6.0, dropout=0.3, targets=LORA.targets)
MODELS: dict[str, Callable[[], tuple[nn.Module, Losses]]] = {
    "mlp": lambda: on_rows(mlp),
    "checkpointed": lambda: on_rows(lambda: Checkpointed(*mlp())),
    "convolutional": lambda: on_rows(convolutional),
    "transformer": lambda: on_rows(transformer),
    "recurrent": lambda: on_rows(Recurrent),
    "fallback": lambda: on_rows(fallback),
    "frozen_backbone": lambda: on_rows(frozen_backbone),
    "wide_resnet": on_images,
    **{name: lambda name=name: on_text(name) for name in [*CAUSAL, *CLASSIFIERS]},  # type: ignore[misc]
    "gpt2_lora_dropout": lambda: on_text("gpt2_lora", lora=ADAPTERS),
    "roberta_lora_dropout": lambda: on_text("roberta_lora", lora=LoraConfig(rank=3, alpha=6.0, dropout=0.3)),
}


KINDS = ("mlp", "checkpointed", "transformer", "wide_resnet", "gpt2_tied", "roberta")
"""One model of each kind, which the fast tests also check with two rows."""


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
@pytest.mark.parametrize(
    ("name", "mode", "rows"),
    [
        pytest.param(*case, marks=[] if mode == "layer" and (rows == 5 or name in KINDS) else [pytest.mark.slow])
        for case in product(MODELS, (*FEW, "block"), (5, 2))
        for name, mode, rows in [case]
    ],
)
def test_ordinary_models_pass(name, mode, rows):
    torch.manual_seed(1)
    model, losses = MODELS[name]()
    with attached(model, mode, 0.3) as engine:
        assert verify(engine, losses, EXAMPLES, rows=rows) < 1e-3


class Attended(nn.Module):
    """Attention with computed queries; keys and values are the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(self.query(x), x, x).mean(1))


def test_gradients_that_are_only_rounding_error_pass():
    torch.manual_seed(0)
    model, x = Attended(32), torch.randn(8, 1, 1).expand(8, 10, 32)
    labels = torch.zeros(8, dtype=torch.long)
    with attach(model, per_layer(model), 0.3) as engine:
        rows = list(range(5))
        assert verify(engine, lambda at: F.cross_entropy(model(x[at]), labels[at], reduction="none"), rows) < 0.05


@pytest.mark.parametrize("mode", FEW)
def test_an_example_without_a_gradient_passes(mode):
    """A pair of equal items, whose scores cancel: in float32 only almost."""
    torch.manual_seed(0)
    users, items = nn.Embedding(20, 8), nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8))
    user, one, two = torch.randint(20, (8,)), torch.randint(40, (8,)), torch.randint(40, (8,))
    two[0] = one[0]

    def losses(at: Sequence[int]) -> Tensor:
        wins, loses = ((users(user[at]) * items(pair[at])).sum(1) for pair in (one, two))
        return F.softplus(loses - wins)

    with attached(nn.ModuleList([users, items]), mode, 0.3) as engine:
        verify(engine, losses, [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    "name",
    [
        *("transformer", "wide_resnet", "gpt2_lora_dropout"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2_tied", "roberta", "bert")),
    ],
)
def test_ordinary_models_pass_in_bfloat16(name):
    torch.manual_seed(1)
    model, losses = MODELS[name]()

    def rounded(examples: Sequence[int]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(examples).float()

    with attach(model, per_layer(model), 0.3) as engine:
        verify(engine, rounded, EXAMPLES)
