"""Finds CIFAR-10 below a folder in one of two layouts, or downloads it with torchvision."""

import http.client
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from groupwise.atomic import lock
from groupwise.data.images import ImageData
from groupwise.data.text_examples import sha256_of_files
from groupwise.errors import UserError, reason
from groupwise.torchvision_import import import_torchvision

BATCHES_FOLDER = "cifar-10-batches-py"
MOSAIC_FOLDER = "cifar10"
MOSAIC_TRAIN = tuple(f"train_shard{shard}.webp" for shard in range(5))
MOSAIC_TEST = "test.webp"
MOSAIC_GRID = 100
MOSAIC_TILE = 32
NUM_CLASSES = 10


def load_cifar10(root: Path) -> ImageData:
    """Load CIFAR-10 (50,000 and 10,000 images of 3×32×32) from the first layout found under `root`.

    The layouts are tried in this order, and the first one found must be complete:
      1. `root`/cifar-10-batches-py, the standard folder of pickled batches;
      2. `root`/cifar10/train_shard0-4.webp and test.webp, lossless mosaics;
      3. a download by torchvision, which makes the standard folder.

    Raises:
        UserError: nothing is found and nothing can be downloaded, or what is found is broken.
    """
    if (root / BATCHES_FOLDER).is_dir():
        return read_batches(root)
    if any((root / MOSAIC_FOLDER / name).is_file() for name in (*MOSAIC_TRAIN, MOSAIC_TEST)):
        return read_mosaics(root)
    _download(root)
    return read_batches(root)


def _download(root: Path) -> None:
    """Download and unpack the standard folder; other processes wait. A failed download leaves nothing behind."""
    datasets = import_torchvision().datasets
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    lock_file = root / ".cifar10-download.lock"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with lock(lock_file, wait=True) or nullcontext():
            if not (root / BATCHES_FOLDER).is_dir():
                with TemporaryDirectory(dir=root) as unpacked:  # an existing folder is complete
                    datasets.CIFAR10(unpacked, download=True)
                    (Path(unpacked) / BATCHES_FOLDER).rename(root / BATCHES_FOLDER)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
        with suppress(OSError):  # another process may download into the same folder
            lock_file.unlink()
            for folder in missing:
                folder.rmdir()
        raise UserError(
            f"CIFAR-10 was not found under {root} and could not be downloaded ({reason(error)}); put there the "
            f"standard folder {BATCHES_FOLDER}/, or mosaics {MOSAIC_FOLDER}/{MOSAIC_TRAIN[0]} to {MOSAIC_TRAIN[-1]} "
            f"and {MOSAIC_FOLDER}/{MOSAIC_TEST}; or give paths.data=FOLDER with one of them."
        ) from error


def read_batches(root: Path) -> ImageData:
    """Read the standard folder `root`/cifar-10-batches-py with torchvision, which first checks each file's MD5.

    Raises:
        UserError: a file is missing, or differs from the published one.
    """
    cifar, folder = import_torchvision().datasets.CIFAR10, root / BATCHES_FOLDER
    try:
        splits = [cifar(root, train=train) for train in (True, False)]
        images, labels = [split.data for split in splits], [np.array(split.targets) for split in splits]
    except Exception as error:  # of an unpickler too
        raise UserError(
            f"{folder} is incomplete, or not as published ({reason(error)}): replace it, or remove it, and CIFAR-10 is "
            "downloaded again."
        ) from error
    names = [name for name, _ in (*cifar.train_list, *cifar.test_list)] + [cifar.meta["filename"]]
    return _image_data(images, labels, [folder / name for name in names], root, "the standard folder")


def read_mosaics(root: Path) -> ImageData:
    """Read lossless mosaics `root`/cifar10/train_shard0.webp to train_shard4.webp and test.webp.

    Each is a picture of 3200×3200 pixels: 100×100 images of 32×32, row by row. The 1,000 images of each class
    follow each other, so image i has label i // 1000 (classes in CIFAR-10's own, alphabetical order).

    Raises:
        UserError: a file is missing, truncated, not a picture, or has the wrong size.
    """
    folder = root / MOSAIC_FOLDER
    paths = [folder / name for name in (*MOSAIC_TRAIN, MOSAIC_TEST)]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is missing; complete the mosaics, or remove the folder {folder}.")
    *train, test = map(_read_mosaic, paths)
    labels = np.arange(MOSAIC_GRID**2) // (MOSAIC_GRID**2 // NUM_CLASSES)
    images = [np.concatenate(train), test]
    return _image_data(images, [np.tile(labels, len(train)), labels], paths, root, "lossless mosaics")


def _read_mosaic(path: Path) -> np.ndarray:
    """Cut one mosaic into its images (10000, 32, 32, 3)."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        tiles = pixels.reshape(MOSAIC_GRID, MOSAIC_TILE, MOSAIC_GRID, MOSAIC_TILE, 3)
    except Exception as error:  # Pillow and its decoders may raise anything on broken bytes
        raise UserError(
            f"{path} is not a readable picture of 3200×3200 pixels ({reason(error)}); replace the file."
        ) from error
    return tiles.transpose(0, 2, 1, 3, 4).reshape(MOSAIC_GRID**2, MOSAIC_TILE, MOSAIC_TILE, 3)


def _image_data(
    images: list[np.ndarray], labels: list[np.ndarray], files: list[Path], root: Path, layout: str
) -> ImageData:
    """An `ImageData` of images (N, H, H, 3) uint8 and labels (N,), to train and to test on, from these files."""
    x_train, x_test = (torch.from_numpy(np.ascontiguousarray(some.transpose(0, 3, 1, 2))) for some in images)
    y_train, y_test = (torch.from_numpy(some.astype(np.int64)) for some in labels)
    digests = sha256_of_files(files, root)
    return ImageData(x_train, y_train, x_test, y_test, NUM_CLASSES, f"CIFAR-10, {layout}", digests)
