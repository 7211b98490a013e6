"""Both layouts of CIFAR-10 are read exactly, and a faulty file is named in a one-sentence error."""

import os
import pickle
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.data.cifar10 import MOSAIC_TRAIN, read_batches, read_mosaics
from tests.data.refusals import refused


class TestBatches:
    def test_images_labels_and_fingerprints(self, tmp_path, make_batches):
        folder = make_batches(tmp_path)
        data = read_batches(tmp_path)
        assert data.x_train.shape == (50, 3, 32, 32)
        assert data.x_test.shape == (10, 3, 32, 32)
        assert data.y_train.tolist() == list(range(10)) * 5
        second = pickle.loads((folder / "data_batch_2").read_bytes())["data"]
        assert torch.equal(data.x_train[10:20].flatten(1), torch.from_numpy(second))
        assert set(data.sha256) == {f"cifar-10-batches-py/{path.name}" for path in folder.iterdir()}

    def test_truncated_file_is_refused(self, tmp_path, make_batches):
        path = make_batches(tmp_path) / "data_batch_4"
        path.write_bytes(path.read_bytes()[:-1])
        assert "cifar-10-batches-py is incomplete, or not as published" in refused(read_batches, tmp_path)

    def test_images_of_another_size_are_refused(self, tmp_path, make_batches):
        make_batches(tmp_path, data=np.zeros((10, 3000), np.uint8))
        assert "cifar-10-batches-py is incomplete" in refused(read_batches, tmp_path)


def write_picture(path: Path, side: int = 3200) -> None:
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    row = np.arange(side, dtype=np.uint8)
    Image.fromarray(np.broadcast_to(row[:, None, None], (side, side, 3)).copy()).save(path, lossless=True, quality=0)


class TestMosaics:
    @pytest.fixture(scope="class")
    def picture(self, tmp_path_factory):
        """A small file whose grey level is the pixel row modulo 256."""
        folder = tmp_path_factory.mktemp("picture") / "cifar10"
        write_picture(folder / "test.webp")
        return folder / "test.webp"

    @pytest.fixture
    def root(self, picture, tmp_path):
        """A root with this picture as all six files."""
        (tmp_path / "cifar10").mkdir()
        shutil.copy(picture, tmp_path / "cifar10" / "test.webp")
        for name in MOSAIC_TRAIN:
            os.link(tmp_path / "cifar10" / "test.webp", tmp_path / "cifar10" / name)
        return tmp_path

    def test_tiles_are_read_by_rows_and_labels_by_thousands(self, root):
        data = read_mosaics(root)
        assert data.x_train.shape == (50_000, 3, 32, 32)
        assert data.y_train.bincount().tolist() == [5000] * 10
        assert data.y_test.tolist() == [index // 1000 for index in range(10_000)]
        # Tile 1,234 is in row 12 of the grid, so its pixel rows start at 12·32 = 384.
        assert data.x_test[1234, 0, :, 5].tolist() == [(384 + row) % 256 for row in range(32)]
        assert list(data.sha256) == [f"cifar10/{name}" for name in (*MOSAIC_TRAIN, "test.webp")]

    @pytest.mark.parametrize("keep", [0, 0.5, 0.95])
    def test_truncated_file_is_refused(self, root, keep):
        path = root / "cifar10" / "train_shard0.webp"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: int(keep * len(content))])
        assert "train_shard0.webp is not a readable picture of 3200×3200 pixels" in refused(read_mosaics, root)

    def test_decompression_bomb_is_refused(self, root):
        from PIL import Image

        path = root / "cifar10" / "train_shard0.webp"
        path.unlink()
        Image.new("1", (1, 1)).save(path, "PNG")
        content = bytearray(path.read_bytes())  # a header that claims many pixels; writing them would take seconds
        content[16:24] = struct.pack(">II", 30000, 30000)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
        path.write_bytes(content)
        assert "decompression bomb" in refused(read_mosaics, root)

    def test_picture_of_another_size_is_refused(self, root):
        (root / "cifar10" / "train_shard0.webp").unlink()
        write_picture(root / "cifar10" / "train_shard0.webp", side=320)
        assert "cannot reshape" in refused(read_mosaics, root)

    @pytest.mark.slow  # decodes 60,000 images; the other tests read synthetic ones
    def test_real_images(self, real_data):
        data = read_mosaics(real_data)
        assert data.x_train.shape == (50_000, 3, 32, 32)
        assert data.x_test.shape == (10_000, 3, 32, 32)
        assert data.y_train.bincount().tolist() == [5000] * 10
        assert data.y_test.bincount().tolist() == [1000] * 10
        pixels = data.x_train.numpy() / np.float32(255)
        np.testing.assert_allclose(pixels.mean(axis=(0, 2, 3)), (0.4914, 0.4822, 0.4465), atol=1e-4)
        np.testing.assert_allclose(pixels.std(axis=(0, 2, 3)), (0.2470, 0.2435, 0.2616), atol=1e-4)
