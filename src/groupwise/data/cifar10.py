"""Finds CIFAR-10 under a folder in any of three layouts, or downloads it there by torchvision."""

import http.client
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
from torch import Tensor

from groupwise.atomic import lock
from groupwise.data.images import NUM_CLASSES, ImageData, checked_images, checked_labels
from groupwise.data.text_examples import sha256_of_files
from groupwise.errors import UserError, reason
from groupwise.torchvision_import import import_torchvision

NETWORK_PATIENCE = 30.0  # seconds without an answer after which a download is aborted


def load_cifar10(root: Path, *, download: bool = True) -> ImageData:
    """Load CIFAR-10 (50,000 and 10,000 images of 3×32×32) from the first layout found under `root`.

    Looked for in this order, and the first found must be whole:
      1. `root` itself, where it is an .npz file (x_train, y_train, x_test, y_test);
      2. `root`/cifar-10-batches-py, the standard folder of pickled batches;
      3. `root`/cifar10.npz;
      4. `root`/cifar10/train_shard0-4.webp and test.webp, lossless mosaics;
      5. a download by torchvision, which becomes the standard folder only when it is complete.

    Raises:
        UserError: nothing is found and nothing may or can be downloaded, or what is found is broken.
    """
    if root.is_file() or root.suffix == ".npz":
        if root.suffix != ".npz" or not root.is_file():
            raise UserError(
                f"{root} is given as the data, but is neither a folder nor a .npz file; give one of the two."
            )
        return read_npz(root)
    if (root / BATCHES_FOLDER).is_dir():
        return read_batches(root)
    if (root / NPZ_FILE).is_file():
        return read_npz(root / NPZ_FILE)
    if any((root / MOSAIC_FOLDER / name).is_file() for name in (*MOSAIC_TRAIN, MOSAIC_TEST)):
        return read_mosaics(root)
    if not download:
        raise UserError(_not_found(root, "and downloading is switched off"))
    _download(root)
    return read_batches(root)


def _download(root: Path) -> None:
    """Put the standard folder into `root`, whole or not at all: it is unpacked elsewhere and then moved.

    Of several processes at once one downloads, and the others wait for it.
    """
    datasets = import_torchvision().datasets
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root), tempfile.TemporaryDirectory(prefix=".cifar10-download-", dir=root) as scratch:
            if (root / BATCHES_FOLDER).is_dir():
                return
            with _network_patience():
                datasets.CIFAR10(scratch, train=True, download=True)
            (Path(scratch) / BATCHES_FOLDER).rename(root / BATCHES_FOLDER)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
        for folder in new:
            with suppress(OSError):  # only an empty one goes
                folder.rmdir()
        reason = str(error).rstrip(".") or type(error).__name__
        raise UserError(_not_found(root, f"and could not be downloaded ({reason})")) from error


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    path = root / ".cifar10-download.lock"
    with lock(path, wait=True) or nullcontext():
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is locked: who waits finds the data then


@contextmanager
def _network_patience() -> Iterator[None]:
    """Set a timeout on a silent network, which torchvision's download lacks."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _not_found(root: Path, why: str) -> str:
    return (
        f"CIFAR-10 was not found under {root} {why}; put there the standard folder {BATCHES_FOLDER}/, "
        f"or {NPZ_FILE} with {', '.join(NPZ_KEYS)}, or mosaics {MOSAIC_FOLDER}/{MOSAIC_TRAIN[0]} to "
        f"{MOSAIC_TRAIN[-1]} and {MOSAIC_FOLDER}/{MOSAIC_TEST}; or give paths.data=FOLDER with one of them."
    )


BATCHES_FOLDER = "cifar-10-batches-py"
NPZ_FILE = "cifar10.npz"
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
MOSAIC_FOLDER = "cifar10"
MOSAIC_TRAIN = tuple(f"train_shard{shard}.webp" for shard in range(5))
MOSAIC_TEST = "test.webp"
MOSAIC_GRID = 100
MOSAIC_TILE = 32


def read_batches(root: Path) -> ImageData:
    """Read the standard folder `root`/cifar-10-batches-py by torchvision, which opens a file only if its MD5 is right.

    Raises:
        UserError: a file is missing, or is not the published one to the bit.
    """
    cifar, folder = import_torchvision().datasets.CIFAR10, root / BATCHES_FOLDER
    arrays: dict[str, np.ndarray] = {}
    try:
        for split in ("train", "test"):
            read = cifar(root, train=split == "train")
            arrays |= {f"x_{split}": read.data, f"y_{split}": np.array(read.targets)}
    except Exception as error:  # of an unpickler too
        raise UserError(
            f"{folder} is not whole, or not as published ({reason(error)}): replace it, or remove it to have CIFAR-10 "
            "downloaded again."
        ) from error
    names = [name for name, _ in (*cifar.train_list, *cifar.test_list)] + [cifar.meta["filename"]]
    return _image_data(arrays, folder, [folder / name for name in names], root, "the standard folder")


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
                if not isinstance(arrays[key], np.ndarray):  # numpy returns members that are not arrays as bytes
                    raise UserError(f"{path}: {key} is not a NumPy array; write the file again.")
    except UserError:
        raise
    except Exception as error:  # numpy, zipfile, zlib and ast may raise these on broken bytes
        why = "it holds pickled objects, which are not opened" if "pickle" in str(error) else reason(error)
        raise UserError(
            f"{path} is not a readable .npz file ({why}); it may be truncated, so write it again."
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
    except Exception as error:  # Pillow and its decoders may raise anything on broken bytes
        raise UserError(
            f"{path} is not a readable picture ({reason(error)}); it may be truncated, so replace it."
        ) from error
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
