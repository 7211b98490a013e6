"""Image classification: a wide residual network (section 5.1, appendix A.1), or a small network on fixed features."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.config.checks import IMAGE_MODELS
from groupwise.config.schema import ModelConfig, RunConfig
from groupwise.data.image_sets import load_images
from groupwise.data.images import ImageData, channel_statistics, hold_out, normalize
from groupwise.errors import UserError
from groupwise.models.efficientnet import SOURCE, lite0_head
from groupwise.models.image_features import FEATURES_OF
from groupwise.models.image_networks import WideResNet, scatter_cnn
from groupwise.models.published import provenance_of
from groupwise.training.from_config import autocast
from groupwise.training.task import Split, Task, row_numbers

Images = tuple[Tensor, Tensor]


class ImageClassification(Task):
    """Cross-entropy and accuracy on images, or features of them, that stay in memory on the device."""

    def __init__(
        self,
        model: nn.Module,
        train: Images,
        valid: Images,
        prepare: Callable[[Tensor], Tensor],
        description: dict[str, Any],
        precision: Callable[[], AbstractContextManager[Any]],
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.train_size = len(train[0])
        self._splits: dict[Split, Images] = {"train": train, "valid": valid}
        self._prepare, self._description, self._precision = prepare, description, precision
        self._network = torch.compile(model) if compiled else model

    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> dict[str, Tensor]:
        """{"images": (n, C, H, W), "labels": (n,)}."""
        images, labels = self._splits["train"]
        rows = row_numbers(examples, images.device)
        return {"images": images[rows], "labels": labels[rows]}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of each example, (n,)."""
        return F.cross_entropy(self._logits(model, batch["images"]), batch["labels"], reduction="none")

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """{"accuracy": percent, "loss": mean cross-entropy}; `final` adds nothing."""
        images, labels = self._splits[split]
        if limit is not None:  # files may be sorted by class
            rows = _first_of_each_class(labels, limit)
            images, labels = images[rows], labels[rows]
        logits = torch.cat([self._logits(self.model, some) for some in images.split(batch_size)])
        losses = F.cross_entropy(logits, labels, reduction="none")
        right = (logits.argmax(1) == labels).double().sum()
        return {"accuracy": 100.0 * float(right) / len(labels), "loss": float(losses.double().sum()) / len(labels)}

    def describe_data(self) -> dict[str, Any]:
        """Source, counts and SHA-256 of the files."""
        return self._description

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        network = self._network if model is self.model else model
        with self._precision():
            logits = network(self._prepare(images))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def make_image_classification(config: RunConfig, device: torch.device) -> ImageClassification:
    """The task of `data.name`, for the network of `model.name`."""
    settings = config.model
    if settings.name not in IMAGE_MODELS:
        raise UserError(f"model.name={settings.name} is not known for images: choose {', '.join(IMAGE_MODELS)}.")
    data = load_images(config.data.name, Path(config.paths.data).expanduser(), image_size=config.data.image_size)
    if config.data.holdout:
        data = hold_out(data, config.data.holdout)
    if settings.name in FEATURES_OF:
        data = FEATURES_OF[settings.name](data)
    chosen = _first_of_each_class(data.y_train, config.data.train_limit)
    model = _network(settings, data).to(device)
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    mean, std = channel_statistics(config.data.name)

    def prepare(images: Tensor) -> Tensor:
        pixels = images.dtype == torch.uint8  # features are normalised by the network itself
        images = (normalize(images, mean, std) if pixels else images.float()).contiguous(memory_format=layout)
        return images.view(images.shape)  # gives one channel the usual strides, which torch chooses kernels by

    return ImageClassification(
        model,
        (data.x_train[chosen].to(device), data.y_train[chosen].to(device)),
        (data.x_test.to(device), data.y_test.to(device)),
        prepare,
        _describe(config, data, len(chosen)),
        autocast(config.train.precision, device),
        compiled=config.train.compile,
    )


def _network(settings: ModelConfig, data: ImageData) -> nn.Module:
    if settings.name == "scatter_cnn":
        return scatter_cnn(data.num_classes, data.channels, data.image_size, settings.norm_groups)
    if settings.name == "lite0_head":
        return lite0_head(data.num_classes)
    return WideResNet(
        depth=settings.depth,
        width=settings.width,
        num_classes=data.num_classes,
        in_channels=data.channels,
        norm_groups=settings.norm_groups,
        weight_standardization=settings.weight_standardization,
    )


def _describe(config: RunConfig, data: ImageData, train_size: int) -> dict[str, Any]:
    if config.data.holdout:
        settings = f"valid, a share of {config.data.holdout:g} of the training set that is set aside"
    elif config.model.name == "scatter_cnn":
        settings = "nothing: as in Tramèr and Boneh (2021)"
    elif config.scale in ("mini", "midi", "lite"):
        settings = "the learning rate: a fifth of the training set that is set aside; the rest: as in the paper"
    else:
        settings = "the test set, as in the paper (appendix A.1)"
    return {
        "source": data.source,
        "sha256": data.sha256,
        "train_examples": train_size,
        "valid_examples": len(data.x_test),
        "image_size": data.image_size,
        "selected_on": f"settings: {settings}; weights: nothing, the last step's",
        **(provenance_of(SOURCE) if config.model.name == "lite0_head" else {}),
    }


def _first_of_each_class(labels: Tensor, limit: int | None) -> Tensor:
    """Indices of `limit` examples, the first of each class, in the order of the data; None takes all.

    An additional row may displace another one, so the guarantee is for neighbouring data sets after this choice.
    """
    if limit is None or limit >= len(labels):
        return torch.arange(len(labels))
    one_hot = F.one_hot(labels)
    rank = (one_hot.cumsum(0) * one_hot).sum(1)  # 1 for the first of its class, 2 for the second, ...
    return torch.argsort(rank, stable=True)[:limit].sort().values
