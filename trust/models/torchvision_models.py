"""Smaller versions of torchvision networks; `libraries.yaml` lists them and the networks that are already small."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision import models


def cut(build: Callable[[], nn.Module], **parts: nn.Module) -> nn.Module:
    """A network with some parts replaced; the weights of the original parts are never allocated."""
    with torch.device("meta"):
        network = build()
    for name, part in parts.items():
        setattr(network, name, part)
    network.to_empty(device="cpu")
    for module in network.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return network


def resnet(block: str) -> nn.Module:
    """A ResNet with the first two of its four stages, one block each."""
    kind = getattr(models.resnet, block)
    removed = {"layer3": nn.Identity(), "layer4": nn.Identity()}
    return cut(partial(models.ResNet, kind, [1, 1, 1, 1]), **removed, fc=nn.Linear(128 * kind.expansion, 3))


def vgg(dropout: float) -> nn.Module:
    """A VGG of four convolutions with pooling, and a small classifier."""
    build = partial(models.VGG, models.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"]))
    return cut(build, classifier=classifier(64 * 49, dropout))


def alexnet(dropout: float) -> nn.Module:
    """The convolutions of AlexNet, and a small classifier."""
    return cut(models.AlexNet, classifier=classifier(256 * 36, dropout))


def classifier(features: int, dropout: float) -> nn.Module:
    """Two linear layers with dropout."""
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 3))


def resnet3d(conv: str, stem: str = "BasicStem") -> nn.Module:
    """A video ResNet with one block in the first of its four stages; `conv` is the kind of its convolutions."""
    module = models.video.resnet
    kinds, stages = [getattr(module, conv)] * 4, [1, 1, 1, 1]
    build = partial(models.video.VideoResNet, module.BasicBlock, kinds, stages, getattr(module, stem), num_classes=3)
    removed = {f"layer{stage}": nn.Identity() for stage in (2, 3, 4)}
    return cut(build, **removed, fc=nn.Linear(64, 3))


def s3d(dropout: float) -> nn.Module:
    """S3D up to its first blocks of parallel convolutions."""
    network = models.video.S3D(num_classes=3, dropout=dropout)
    head = nn.Sequential(nn.Dropout(dropout), nn.Conv3d(256, 3, 1))
    network.features, network.classifier, network.avgpool = network.features[:6], head, nn.AdaptiveAvgPool3d(1)
    return network
