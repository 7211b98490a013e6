"""Networks of torchvision for images and video, small, with GroupNorm where they are made with BatchNorm."""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from groupwise.torchvision_import import import_torchvision
from trust.models.architecture import Architecture, Size, Subject, decisions

FAMILY, FRAMES = "torchvision", 4


def of(
    name: str, make: Callable[[ModuleType, Size], nn.Module], image: int = 0, frames: int = 0, mixes: bool = False
) -> Architecture:
    """A line of the list: (torchvision.models, size) -> network; `image` pixels an edge where it needs as many.

    Every BatchNorm becomes GroupNorm with up to 4 groups, unless it may stay (`mixes`).
    """

    def build(size: Size) -> Subject:
        network = make(import_torchvision().models, size)
        for path, layer in list(network.named_modules()):
            if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d) and not mixes:
                channels = layer.num_features
                groups = next(groups for groups in (4, 3, 2, 1) if channels % groups == 0)
                network.set_submodule(path, nn.GroupNorm(groups, channels))
        edge = max(image, size.image)
        shape = (3, frames, edge, edge) if frames else (3, edge, edge)
        return Subject(network, {"images": size.vectors(*shape), "labels": size.labels()}, decisions)

    return Architecture(name, FAMILY, build, mixes)


def cut(build: Callable[[], nn.Module], **parts: nn.Module) -> nn.Module:
    """A network with other parts than its own, whose millions of weights are never made."""
    with torch.device("meta"):
        network = build()
    for name, part in parts.items():
        setattr(network, name, part)
    network.to_empty(device="cpu")
    for module in network.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return network


def resnet(models: ModuleType, size: Size, block: str = "BasicBlock") -> nn.Module:
    """The first two of its four stages, of one block each."""
    kind = getattr(models.resnet, block)
    none = {"layer3": nn.Identity(), "layer4": nn.Identity()}
    return cut(partial(models.ResNet, kind, [1, 1, 1, 1]), **none, fc=nn.Linear(128 * kind.expansion, 3))


def convnext(models: ModuleType, size: Size) -> nn.Module:
    """Two stages; a layer scale that matters, and stochastic depth."""
    settings = [
        models.convnext.CNBlockConfig(size.width, 2 * size.width, 1),
        models.convnext.CNBlockConfig(2 * size.width, None, 2),
    ]
    return models.ConvNeXt(settings, stochastic_depth_prob=size.dropout, layer_scale=0.5, num_classes=3)


def efficientnet(models: ModuleType, size: Size) -> nn.Module:
    """Inverted residuals with squeeze and excitation."""
    setting = partial(models.efficientnet.MBConvConfig, kernel=3, num_layers=2)
    settings = [
        setting(expand_ratio=1, stride=1, input_channels=16, out_channels=16),
        setting(expand_ratio=4, stride=2, input_channels=16, out_channels=24),
    ]
    return models.EfficientNet(settings, dropout=size.dropout, stochastic_depth_prob=size.dropout, num_classes=3)


def mobilenet_v3(models: ModuleType, size: Size) -> nn.Module:
    """Three inverted residuals, hard swish, squeeze and excitation."""
    setting = partial(models.mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1.0)
    settings = [
        setting(16, 3, 16, 16, True, "RE", 2),
        setting(16, 3, 32, 24, False, "RE", 2),
        setting(24, 5, 48, 24, True, "HS", 1),
    ]
    return models.MobileNetV3(settings, 32, num_classes=3, dropout=size.dropout)


def swin(models: ModuleType, size: Size, version: int = 1) -> nn.Module:
    """Two stages with shifted windows and tables of relative positions."""
    module = models.swin_transformer
    own: dict[str, Any] = {}
    if version == 2:
        own = {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    return module.SwinTransformer(
        [4, 4], size.width, [2, 2], [2, 4], [4, 4], 2.0, size.dropout, size.dropout, size.dropout, 3, **own
    )


def vgg(models: ModuleType, size: Size) -> nn.Module:
    """Four convolutions with pooling, and a small classifier."""
    build = partial(models.VGG, models.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"]))
    return cut(build, classifier=classifier(64 * 49, size))


def alexnet(models: ModuleType, size: Size) -> nn.Module:
    """Its convolutions as they are, and a small classifier."""
    return cut(models.AlexNet, classifier=classifier(256 * 36, size))


def classifier(features: int, size: Size) -> nn.Module:
    """Two linear layers with dropout."""
    return nn.Sequential(nn.Dropout(size.dropout), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 3))


def vit(models: ModuleType, size: Size) -> nn.Module:
    """A class token, a table of positions, MultiheadAttention."""
    network: nn.Module = models.VisionTransformer(
        size.image, 8, size.depth, 4, size.width, 2 * size.width, size.dropout, size.dropout, 3
    )
    nn.init.normal_(network.get_parameter("heads.head.weight"), std=0.1)  # it begins at zero
    return network


def densenet(models: ModuleType, size: Size) -> nn.Module:
    """Concatenations of all that came before, inside its blocks."""
    return models.DenseNet(8, (2, 2, 2, 2), 16, drop_rate=size.dropout, num_classes=3)


def regnet(models: ModuleType, size: Size) -> nn.Module:
    """Grouped convolutions with squeeze and excitation."""
    parameters = models.regnet.BlockParams([1, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return models.RegNet(parameters, num_classes=3, stem_width=16)


def resnet3d(models: ModuleType, size: Size, block: str = "BasicBlock", stem: str = "BasicStem") -> nn.Module:
    """The first of four stages, of one block; each convolution over space and time, or one after the other."""
    video, module = models.video, models.video.resnet
    kinds = {"BasicBlock": module.Conv3DSimple, "R2Plus1D": module.Conv2Plus1D, "MC3": module.Conv3DNoTemporal}
    build = partial(
        video.VideoResNet,
        module.BasicBlock,
        [kinds[block]] * 4,
        [1, 1, 1, 1],
        getattr(module, stem),
        num_classes=3,
    )
    none = {f"layer{stage}": nn.Identity() for stage in (2, 3, 4)}
    return cut(build, **none, fc=nn.Linear(64, 3))


def s3d(models: ModuleType, size: Size) -> nn.Module:
    """Up to the first blocks of parallel convolutions."""
    whole = models.video.S3D(num_classes=3, dropout=size.dropout)
    head = nn.Sequential(nn.Dropout(size.dropout), nn.Conv3d(256, 3, 1))
    whole.features, whole.classifier, whole.avgpool = whole.features[:6], head, nn.AdaptiveAvgPool3d(1)
    return whole


def swin3d(models: ModuleType, size: Size) -> nn.Module:
    """Two stages with shifted windows in space and time."""
    return models.video.SwinTransformer3d(
        [2, 4, 4], 8, [2, 2], [2, 4], [2, 4, 4], 2.0, size.dropout, size.dropout, size.dropout, num_classes=3
    )


def mvit(models: ModuleType, size: Size) -> nn.Module:
    """Two blocks; queries and keys are pooled."""
    config = importlib.import_module("torchvision.models.video.mvit").MSBlockConfig  # a function has the module's name
    blocks = [
        config(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        config(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return models.video.MViT(
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


NETWORKS = (
    of("ResNet, GroupNorm", resnet),
    of("ResNet bottleneck, GroupNorm", partial(resnet, block="Bottleneck")),
    of("ResNet, BatchNorm", resnet, mixes=True),
    of("ViT (torchvision)", vit),
    of("Swin (torchvision)", swin),
    of("Swin v2 (torchvision)", partial(swin, version=2)),
    of("ConvNeXt (torchvision)", convnext),
    of("EfficientNet, GroupNorm", efficientnet),
    of("MobileNetV3, GroupNorm", mobilenet_v3),
    of("ShuffleNetV2, GroupNorm", lambda models, size: models.shufflenet_v2_x0_5(num_classes=3)),
    of("DenseNet, GroupNorm", densenet),
    of("RegNet, GroupNorm", regnet),
    of("VGG", vgg),
    of("AlexNet", alexnet, image=64),
    of("SqueezeNet", lambda models, size: models.SqueezeNet("1_1", 3, size.dropout)),
)
VIDEO = (
    of("R3D, GroupNorm", resnet3d, frames=FRAMES),
    of("R(2+1)D, GroupNorm", partial(resnet3d, block="R2Plus1D", stem="R2Plus1dStem"), frames=FRAMES),
    of("MC3, GroupNorm", partial(resnet3d, block="MC3"), frames=FRAMES),
    of("S3D, GroupNorm", s3d, frames=2 * FRAMES),
    of("Swin3D", swin3d, frames=FRAMES),
    of("MViT", mvit, frames=FRAMES),
)
