"""The three layouts in which CIFAR-10 may lie on a disk, one reader each.

Each reader takes existing paths and returns an `ImageData`, or raises one `UserError` that names the file.
"""

import pickle
import zipfile
import zlib
from pathlib import Path

import numpy as np
from torch import Tensor

from groupwise.data.arrays import NUM_CLASSES, checked_images, checked_labels
from groupwise.data.checksum import sha256_of_files
from groupwise.data.images import ImageData
from groupwise.data.torchvision_compat import import_torchvision
from groupwise.errors import UserError

BATCHES_FOLDER = "cifar-10-batches-py"
NPZ_FILE = "cifar10.npz"
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
MOSAIC_FOLDER = "cifar10"
MOSAIC_TRAIN = tuple(f"train_shard{shard}.webp" for shard in range(5))
MOSAIC_TEST = "test.webp"
MOSAIC_GRID = 100
MOSAIC_TILE = 32


def read_batches(root: Path) -> ImageData:
    """Read the standard folder `root`/cifar-10-batches-py through torchvision, each file checked by its MD5.

    Raises:
        UserError: a file is missing, or is not the published one to the bit.
    """
    datasets = import_torchvision().datasets
    folder = root / BATCHES_FOLDER
    listed = [*datasets.CIFAR10.train_list, *datasets.CIFAR10.test_list]
    listed.append((datasets.CIFAR10.meta["filename"], datasets.CIFAR10.meta["md5"]))
    for name, md5 in listed:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing; complete the folder, or remove it to have CIFAR-10 downloaded again.")
        if not datasets.utils.check_integrity(str(path), md5):
            raise UserError(
                f"{path} is truncated or altered (its MD5 is not the published {md5}); replace it, or "
                "remove the folder to have CIFAR-10 downloaded again."
            )
    arrays = {}
    for split, train in (("train", True), ("test", False)):
        try:
            dataset = datasets.CIFAR10(str(root), train=train, download=False)
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{folder} cannot be read ({error}); replace it by the published folder.") from error
        arrays[f"x_{split}"], arrays[f"y_{split}"] = dataset.data, np.asarray(dataset.targets)
    return _image_data(arrays, folder, [folder / name for name, _ in listed], root, "the standard folder")


def read_npz(path: Path) -> ImageData:
    """Read an .npz with x_train, x_test (N, H, H, 3) of uint8 and y_train, y_test (N,) of integers.

    N and H may be any: a sample of CIFAR-10, or one of smaller images, is fine.

    Raises:
        UserError: the file is no .npz, is truncated, or lacks an array.
    """
    arrays = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for key in NPZ_KEYS:
                if key not in archive:
                    raise UserError(
                        f"{path} has no array {key}; it must hold {', '.join(NPZ_KEYS)}; write it again with all four."
                    )
                arrays[key] = archive[key]
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise UserError(
            f"{path} is not a readable .npz file ({error}); it may be truncated, so write it again."
        ) from error
    return _image_data(arrays, path, [path], path.parent, "an .npz file")


def read_mosaics(root: Path) -> ImageData:
    """Read lossless mosaics `root`/cifar10/train_shard0.webp to train_shard4.webp and test.webp.

    Each is a picture of 3200×3200 pixels: 100×100 images of 32×32, row by row, 1,000 of each class one class
    after the other, so image i has label i // 1000 (classes in CIFAR-10's own, alphabetical order).

    Raises:
        UserError: a file is missing, truncated, no picture, or of another size.
    """
    folder = root / MOSAIC_FOLDER
    paths = [folder / name for name in (*MOSAIC_TRAIN, MOSAIC_TEST)]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is missing; complete the mosaics, or remove the folder {folder}.")
    images = [_read_mosaic(path) for path in paths]
    labels = np.arange(MOSAIC_GRID**2) // (MOSAIC_GRID**2 // NUM_CLASSES)
    arrays = {
        "x_train": np.concatenate(images[:-1]),
        "y_train": np.tile(labels, len(MOSAIC_TRAIN)),
        "x_test": images[-1],
        "y_test": labels,
    }
    return _image_data(arrays, folder, paths, root, "lossless mosaics")


def _read_mosaic(path: Path) -> np.ndarray:
    """Cut one mosaic into its images (10000, 32, 32, 3)."""
    from PIL import Image

    side = MOSAIC_GRID * MOSAIC_TILE
    try:
        with Image.open(path) as picture:
            if picture.size != (side, side):
                raise UserError(
                    f"{path} has {picture.size[0]}×{picture.size[1]} pixels, but a mosaic has "
                    f"{side}×{side}; replace it."
                )
            pixels = np.asarray(picture.convert("RGB"))
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise UserError(f"{path} is not a readable picture ({error}); it may be truncated, so replace it.") from error
    tiles = pixels.reshape(MOSAIC_GRID, MOSAIC_TILE, MOSAIC_GRID, MOSAIC_TILE, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(MOSAIC_GRID**2, MOSAIC_TILE, MOSAIC_TILE, 3)


def _image_data(arrays: dict[str, np.ndarray], path: Path, files: list[Path], root: Path, layout: str) -> ImageData:
    """Check the four arrays and put them together with the fingerprints of the files."""
    tensors: dict[str, Tensor] = {}
    for split in ("train", "test"):
        tensors[f"x_{split}"] = checked_images(arrays[f"x_{split}"], path, f"x_{split}")
        tensors[f"y_{split}"] = checked_labels(arrays[f"y_{split}"], tensors[f"x_{split}"], path, f"y_{split}")
    if tensors["x_train"].shape[1:] != tensors["x_test"].shape[1:]:
        raise UserError(
            f"{path}: x_train has images of {tensors['x_train'].shape[-1]} pixels a side and x_test of "
            f"{tensors['x_test'].shape[-1]}; the two must be of one size, so write it again."
        )
    return ImageData(
        **tensors, num_classes=NUM_CLASSES, source=f"CIFAR-10, {layout}", sha256=sha256_of_files(files, root)
    )
