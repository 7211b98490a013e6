"""Small networks of torchvision, timm and diffusers with random weights, as listed in `libraries.yaml`."""

import importlib
import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from groupwise.torchvision_import import import_torchvision, import_torchvision_first
from trust.models.architecture import Architecture, Batch, Size, Subject, decisions, in_eval

LISTED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("libraries.yaml").read_text())


def settings(size: Size, own: dict[str, Any]) -> dict[str, Any]:
    """An entry of the list with the numbers of `size` filled in."""
    numbers = asdict(size) | {"wide": 2 * size.width, "quarter": size.width // 4, "positions": 2 * size.tokens}
    return OmegaConf.to_container(OmegaConf.create({**numbers, "own": own}), resolve=True)["own"]  # type: ignore


def torchvision(name: str, own: dict[str, Any]) -> Architecture:
    """A network for images or videos; BatchNorm becomes GroupNorm with up to 4 groups, unless the entry has `mixes`."""
    image, frames, mixes = own.get("image", 0), own.get("frames", 0), own.get("mixes", False)
    given = {key: value for key, value in own.items() if key not in ("image", "frames", "mixes")}

    def make(size: Size) -> Subject:
        import_torchvision()
        network = instantiate(settings(size, given), _convert_="all")
        for path, layer in list(network.named_modules()):
            if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d) and not mixes:
                groups = next(groups for groups in (4, 3, 2, 1) if layer.num_features % groups == 0)
                network.set_submodule(path, nn.GroupNorm(groups, layer.num_features))
        edge = max(image, size.image)
        shape = (3, frames, edge, edge) if frames else (3, edge, edge)
        return Subject(network, {"images": size.vectors(*shape), "labels": size.labels()}, decisions)

    return Architecture(name, "torchvision", make, mixes)


def timm(name: str, own: dict[str, Any]) -> Architecture:
    """A network for images; BatchNorm is in eval mode, unless the entry has `mixes`."""
    image, mixes = own.get("image", 32), own.get("mixes", False)
    given = {key: value for key, value in own.items() if key not in ("image", "mixes")}

    def make(size: Size) -> Subject:
        import_torchvision_first()  # timm imports torchvision
        known = inspect.signature(get_class(given["_target_"])).parameters
        rates = {rate: size.dropout for rate in ("drop_rate", "drop_path_rate") if rate in known or "kwargs" in known}
        network = instantiate(given, num_classes=3, **rates, _convert_="all")
        if not mixes:
            for layer in network.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm) or type(layer).__name__ == "RelPosMlp":
                    in_eval(layer)  # the latter drops one bias for the whole batch
        nn.init.normal_(list(network.parameters())[-2], std=0.1)  # many heads are initialised to zero
        larger = Size(size.batch, image=image)
        with torch.no_grad():
            network(larger.images())  # some fill position buffers in their first forward pass
        return Subject(network, {"images": larger.images(), "labels": larger.labels()}, decisions)

    return Architecture(name, "timm", make, mixes, needs="timm")


def diffusers_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared errors (B,) of a network that takes all but the target, and returns its prediction first."""
    inputs = {name: values for name, values in batch.items() if name != "target"}
    found = model(**inputs, return_dict=False)[0]
    return (found[:, : batch["target"].shape[1]] - batch["target"]).square().flatten(1).mean(1)


def diffusers(name: str, own: dict[str, Any]) -> Architecture:
    """A network that predicts the noise of an example, or reconstructs its image."""
    given = {key: value for key, value in own.items() if key not in ("inputs", "target")}

    def make(size: Size) -> Subject:
        import_torchvision_first()  # diffusers imports transformers
        importlib.import_module("diffusers").logging.set_verbosity_error()  # no warning on the cast by `to`
        network = instantiate(given, _convert_="all")
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = size.dropout
            elif getattr(module, "dropout_prob", 0):  # it drops the class of some examples
                in_eval(module)
        inputs = {key: _drawn(size, shape) for key, shape in own["inputs"].items()}
        return Subject(network, {**inputs, "target": size.vectors(*own["target"])}, diffusers_losses)

    return Architecture(name, "diffusers", make, needs="diffusers")


def _drawn(size: Size, shape: Any) -> Tensor:
    if shape == "time":
        return torch.randint(1, 1000, (size.batch,))
    return size.labels(shape) if isinstance(shape, int) else size.vectors(*shape)


NETWORKS = tuple(torchvision(name, own) for name, own in LISTED["torchvision"].items())
VIDEO = tuple(torchvision(name, own) for name, own in LISTED["torchvision, video"].items())
TIMM = tuple(timm(name, own) for name, own in LISTED["timm"].items())
DIFFUSERS = tuple(diffusers(name, own) for name, own in LISTED["diffusers"].items())
