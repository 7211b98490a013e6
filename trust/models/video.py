"""Networks for video of torchvision: small, and GroupNorm where they are made with BatchNorm."""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

from torch import nn

from groupwise.torchvision_import import import_torchvision
from trust.models.architecture import Architecture, Size, Subject, decisions
from trust.models.torchvision_models import FAMILY, cut, group_norm

FRAMES = 4


def of(name: str, make: Callable[[ModuleType, Size], nn.Module], frames: int = FRAMES) -> Architecture:
    """A line of the list: (torchvision.models.video, size) -> network."""

    def build(size: Size) -> Subject:
        network = make(import_torchvision().models.video, size)
        for path, layer in list(network.named_modules()):
            if isinstance(layer, nn.BatchNorm3d):
                network.set_submodule(path, group_norm(layer.num_features))
        batch = {"images": size.vectors(3, frames, size.image, size.image), "labels": size.labels()}
        return Subject(network, batch, decisions)

    return Architecture(name, FAMILY, build)


def resnet(video: ModuleType, size: Size, block: str = "BasicBlock", stem: str = "BasicStem") -> nn.Module:
    """The first of four stages, of one block; each convolution over space and time, or one after the other."""
    module = video.resnet
    kinds = {"BasicBlock": module.Conv3DSimple, "R2Plus1D": module.Conv2Plus1D, "MC3": module.Conv3DNoTemporal}
    build = partial(
        video.VideoResNet, module.BasicBlock, [kinds[block]] * 4, [1, 1, 1, 1], getattr(module, stem), num_classes=3
    )
    none = {f"layer{stage}": nn.Identity() for stage in (2, 3, 4)}
    return cut(build, **none, fc=nn.Linear(64, 3))


def s3d(video: ModuleType, size: Size) -> nn.Module:
    """Up to the first blocks of parallel convolutions."""
    whole = video.S3D(num_classes=3, dropout=size.dropout)
    head = nn.Sequential(nn.Dropout(size.dropout), nn.Conv3d(256, 3, 1))
    whole.features, whole.classifier, whole.avgpool = whole.features[:6], head, nn.AdaptiveAvgPool3d(1)
    return whole


def swin(video: ModuleType, size: Size) -> nn.Module:
    """Two stages with shifted windows in space and time."""
    return video.SwinTransformer3d(
        [2, 4, 4], 8, [2, 2], [2, 4], [2, 4, 4], 2.0, size.dropout, size.dropout, size.dropout, num_classes=3
    )


def mvit(video: ModuleType, size: Size) -> nn.Module:
    """Two blocks; queries and keys are pooled."""
    config = importlib.import_module("torchvision.models.video.mvit").MSBlockConfig  # a function has the module's name
    blocks = [
        config(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        config(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return video.MViT(
        (size.image, size.image),
        FRAMES,
        blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        dropout=size.dropout,
        attention_dropout=size.dropout,
        stochastic_depth_prob=size.dropout,
        num_classes=3,
    )


VIDEO = (
    of("R3D, GroupNorm", resnet),
    of("R(2+1)D, GroupNorm", partial(resnet, block="R2Plus1D", stem="R2Plus1dStem")),
    of("MC3, GroupNorm", partial(resnet, block="MC3")),
    of("S3D, GroupNorm", s3d, frames=8),
    of("Swin3D", swin),
    of("MViT", mvit),
)
