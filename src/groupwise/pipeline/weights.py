"""Tensors of a transformers folder, read one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.errors import UserError, reason

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Weights:
    """The tensors of a folder that `save_pretrained` wrote, in one file or in shards; read one at a time.

    Args:
        folder: has model.safetensors, or model.safetensors.index.json and what it names.
        source: how messages call it.

    Raises:
        UserError: it has neither, or they cannot be read.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self._folder, self._source = folder, source
        self._open: dict[str, Any] = {}
        try:
            if (folder / INDEX).is_file():
                self._files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
                if odd := [file for file in self._files.values() if Path(file).name != file]:
                    raise ValueError(f"{INDEX} names {odd[0]}, which is not of this folder")
            elif (folder / SINGLE).is_file():
                self._files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
            else:
                raise UserError(
                    f"model.source={source} has no {SINGLE} and no {INDEX}, from which a stage could read its part: "
                    "load the model with transformers and write it with save_pretrained."
                )
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error

    def read(self, *names: str) -> Tensor:
        """The tensor that stands under the first of these names which the files know, on the CPU.

        Raises:
            UserError: they know none.
        """
        name = next((name for name in names if name in self._files), None)
        if name is None:
            raise UserError(
                f"model.source={self._source} has no weights for {names[0]!r}: give a folder whose weights and "
                "config.json belong to a causal language model."
            )
        from safetensors import SafetensorError

        try:
            return self._handle(self._files[name]).get_tensor(name)
        except SafetensorError as error:
            raise self._unreadable(error) from error

    def _handle(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise self._unreadable(error) from error
        return self._open[file]

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(
            f"model.source={self._source} has weights that cannot be read ({reason(error)}): copy the folder anew."
        )
