"""Loads a stage without the whole model in memory: the model is built empty and split, then the stage is filled."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError, reason
from groupwise.models.hub import make_config
from groupwise.models.trainable import choose_trainable
from groupwise.pipeline.model_parts import check_known
from groupwise.pipeline.split import Ranges, cut
from groupwise.pipeline.stage import Stage
from groupwise.torchvision_import import import_torchvision_first


def load_stage(
    settings: ModelConfig,
    tokenizer: Any,
    choose: Callable[[nn.Module], Ranges],
    index: int,
    *,
    seed: int,
    device: torch.device,
    **options: Any,
) -> Stage:
    """Stage `index` of `model.source` on `device`, with frozen parameters; only its own tensors are read.

    It equals the stage that `cut` makes of the whole model, except for the adapters. Their A is drawn from peft's
    distribution by `seed` and the parameter's name, so it does not depend on the number of stages. B is zero.

    Args:
        settings: with a `source` that is a folder of `save_pretrained`, with one of `FILES`.
        choose: the whole model on the meta device -> the ranges, such as `partial(choose_ranges, stages=4)`.
        seed: of the adapters' A.
        options: as in `cut`.

    Raises:
        UserError: as in `make_config`, `choose_trainable` and `cut`; a source that lacks a tensor.
    """
    model = empty_model(settings, tokenizer)
    aliases, weights = _aliases(model, settings.untie), Weights(Path(str(settings.source)))
    stage = cut(model, choose(model), index, **options)
    names = stage.names
    filled: dict[int, Tensor] = {}
    for local, empty in stage.state_dict(keep_vars=True).items():
        if id(empty) not in filled:  # tied, as one parameter under two names
            value = _adapter(names[local], empty, seed)
            value = weights.read(*aliases(names[local])) if value is None else value
            if value.shape != empty.shape:
                raise UserError(
                    f"model.source={settings.source} has weights of another shape for {names[local]!r}: give a folder "
                    "whose weights and config.json belong together."
                )
            filled[id(empty)] = value.to(device, empty.dtype)
            if isinstance(empty, nn.Parameter):
                filled[id(empty)] = nn.Parameter(filled[id(empty)], requires_grad=empty.requires_grad)
        module, _, leaf = local.rpartition(".")
        setattr(stage.get_submodule(module), leaf, filled[id(empty)])
    return stage.to(device)


def empty_model(settings: ModelConfig, tokenizer: Any) -> nn.Module:
    """`model.source` with its adapters, parameters on the meta device, buffers on the CPU; raises as `load_stage`."""
    import_torchvision_first()  # before transformers, whose import would fail
    import transformers
    from accelerate import init_empty_weights

    config = make_config(settings, tokenizer)
    check_known(config.model_type)
    half = settings.trains == "lora" and settings.frozen_dtype == "bfloat16"
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if half else torch.float32, attn_implementation=settings.attention
        )
    if settings.untie:
        model.config.tie_word_embeddings = False
    model.tie_weights()  # tied parameters became two on the meta device
    with init_empty_weights(include_buffers=False):
        return choose_trainable(model.train(), settings)


def _aliases(model: nn.Module, untied: bool) -> Callable[[str], list[str]]:
    """A function from a parameter's name in `model` to its possible names in the files, the most likely first.

    A head that is or was tied to the token embedding is often not saved under its own name. Some folders, such as the
    hub's gpt2, leave out the first part of all names.
    """
    network: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    names = {id(module): f"{name}.weight" for name, module in network.named_modules()}
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    same = {names[id(head)]: names[id(embedding)]} if untied or head.weight is embedding.weight else {}

    def aliases(name: str) -> list[str]:
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        found = [name, *([same[name]] if name in same else [])]
        return found + [other.removeprefix(f"{network.base_model_prefix}.") for other in found]

    return aliases


def _adapter(name: str, empty: Tensor, seed: int) -> Tensor | None:
    """An adapter's initial values, as in peft: A uniform with variance 1 / (3 · inputs), B zero. None for others."""
    if ".lora_B." in name:
        return torch.zeros(empty.shape)
    if ".lora_A." not in name:
        return None
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return nn.init.kaiming_uniform_(torch.empty(empty.shape, device="cpu"), a=math.sqrt(5), generator=generator)


SINGLE, INDEX = FILES = ("model.safetensors", "model.safetensors.index.json")


class Weights:
    """The tensors in a folder of `save_pretrained`; they are read one at a time.

    They are in model.safetensors, or in the files that model.safetensors.index.json names. Raises `UserError` if they
    cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._source = folder
        self._open = cache(lambda file: safe_open(folder / file, framework="pt"))
        with self._reading():
            if (folder / INDEX).is_file():
                self._files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
                if odd := [file for file in self._files.values() if Path(file).name != file]:
                    raise ValueError(f"{INDEX} names {odd[0]}, which is not of this folder")
            else:
                self._files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def read(self, *names: str) -> Tensor:
        """The tensor of the first of these names that is in the files, on the CPU; a `UserError` if none is."""
        name = next((name for name in names if name in self._files), None)
        if name is None:
            raise UserError(
                f"model.source={self._source} has no weights for {names[0]!r}: give a folder whose weights and "
                "config.json belong to a causal language model."
            )
        with self._reading():
            return self._open(self._files[name]).get_tensor(name)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"model.source={self._source} has weights that cannot be read ({reason(error)}): copy the folder again."
            ) from error
