"""Builds the benchmarked networks, with the architectures of the paper and others, fresh weights and random data."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.language import Built, gpt2, llama, lora_gpt2, lora_gpt2_xl, lora_llama, roberta
from groupwise.errors import UserError

TINY_TOKENS = 7


@dataclass(frozen=True)
class Kind:
    """How a workload is built, and its default sizes."""

    make: Callable[..., Built]
    batch: int
    layers: int | None = None  # None if depth and tokens cannot be chosen
    tokens: int = 0
    channels_last: bool = False
    in_all: bool = True  # whether "all" includes it


@dataclass
class Workload:
    """A model in training mode and its per-example losses.

    Args:
        name: one of `WORKLOADS`.
        model: on its device, in its memory format.
        losses: runs the model on these rows of the batch and returns their losses, (n,); None means the whole batch.
        batch: B.
        layers: transformer blocks; None if the depth cannot be chosen.
        data: the tensors of the batch, with examples on the first axis.
    """

    name: str
    model: nn.Module
    losses: Callable[[Sequence[int] | None], Tensor]
    batch: int
    layers: int | None
    data: dict[str, Tensor] = field(default_factory=dict)

    def loss(self) -> Tensor:
        """Losses of the batch, (B,)."""
        return self.losses(None)

    @cached_property
    def trainable(self) -> list[nn.Parameter]:
        """The trainable parameters, each once, found at first use, as some other libraries freeze parameters later."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def build(
    name: str,
    *,
    batch: int | None = None,
    layers: int | None = None,
    tokens: int | None = None,
    tiny: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    channels_last: bool = False,
) -> Workload:
    """Make a workload; equal arguments give equal weights and data.

    Args:
        name: one of `WORKLOADS`.
        batch: B; None means the default of the workload.
        layers: transformer blocks; None means all of the full model.
        tokens: T of a language model; None means the default of the workload.
        tiny: the same layers at sizes for tests.
        device: "cpu", "cuda"; "meta" builds only the shapes.
        dtype: "float32", "float64", or "bfloat16", which keeps float32 parameters and runs the model in autocast.
        channels_last: put images and convolutions into that memory format.

    Raises:
        UserError: channels_last was asked for without images.
    """
    kind = WORKLOADS[name]
    if channels_last and not kind.channels_last:
        raise UserError(f"channels_last was asked for, but workload={name} has no images.")
    size = batch or (4 if tiny else kind.batch)
    depth = length = None
    if kind.layers is not None:
        depth, length = layers or (2 if tiny else kind.layers), tokens or (TINY_TOKENS if tiny else kind.tokens)
    with torch.random.fork_rng(devices=[]), torch.device("meta") if device == "meta" else nullcontext():
        torch.manual_seed(0)
        built = kind.make(size, tiny) if depth is None else kind.make(size, depth, length, tiny)
    model, data = built.model.train(), built.batch
    model.to(device)
    data = {key: value.to(device) for key, value in data.items()}
    if dtype == "float64":
        model.double()
        data = {key: value.double() if value.is_floating_point() else value for key, value in data.items()}
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        data = {k: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in data.items()}

    def losses(rows: Sequence[int] | None) -> Tensor:
        full = workload.data
        chosen = full if rows is None else {key: value[list(rows)] for key, value in full.items()}
        with torch.autocast(device, torch.bfloat16) if dtype == "bfloat16" else nullcontext():
            return built.losses(model, chosen)

    workload = Workload(name, model, losses, size, depth, data)
    return workload


def _wide_resnet(batch: int, tiny: bool, *, weight_standardization: bool) -> Built:
    from groupwise.models.image_networks import WideResNet

    model = WideResNet(
        depth=10 if tiny else 16,
        width=1 if tiny else 4,
        weight_standardization=weight_standardization,
    )
    edge = 8 if tiny else 32
    return Built(model, {"x": torch.randn(batch, 3, edge, edge), "y": torch.randint(0, 10, (batch,))}, _cross_entropy)


def _mlp(batch: int, tiny: bool) -> Built:
    inputs, width = (12, 16) if tiny else (784, 1024)
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    data = {"x": torch.randn(batch, inputs), "y": torch.randint(0, 10, (batch,))}
    return Built(nn.Sequential(*layers), data, _cross_entropy)


def _cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


WORKLOADS = {
    "wrn16_4_ws": Kind(partial(_wide_resnet, weight_standardization=True), batch=32, channels_last=True),
    "wrn16_4_conv": Kind(partial(_wide_resnet, weight_standardization=False), batch=32, channels_last=True),
    "roberta_base": Kind(roberta, batch=8, layers=12, tokens=64),
    "gpt2": Kind(partial(gpt2, tied=True), batch=4, layers=12, tokens=100),
    "gpt2_64": Kind(partial(gpt2, tied=True), batch=4, layers=12, tokens=64, in_all=False),
    "gpt2_untied": Kind(partial(gpt2, tied=False), batch=4, layers=12, tokens=100),
    "mlp": Kind(_mlp, batch=256),
    "lora_gpt2": Kind(lora_gpt2, batch=4, layers=12, tokens=100),
    "llama": Kind(llama, batch=4, layers=30, tokens=100),
    "lora_llama": Kind(lora_llama, batch=4, layers=30, tokens=100),
    "lora_gpt2_xl": Kind(lora_gpt2_xl, batch=1, layers=48, tokens=256, in_all=False),
}
