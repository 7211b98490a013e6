"""Find CIFAR-10 under a folder, or download it there."""

import http.client
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from groupwise.data.cifar10_layouts import (
    BATCHES_FOLDER,
    MOSAIC_FOLDER,
    MOSAIC_TEST,
    MOSAIC_TRAIN,
    NPZ_FILE,
    NPZ_KEYS,
    read_batches,
    read_mosaics,
    read_npz,
)
from groupwise.data.images import ImageData
from groupwise.data.torchvision_compat import import_torchvision
from groupwise.errors import UserError

NETWORK_PATIENCE = 30.0  # seconds without an answer after which a download is given up


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
            raise UserError(f"{root} was given as the data, but is no folder and no .npz file; give one of the two.")
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
    """Put the standard folder into `root`, whole or not at all: it is unpacked elsewhere and then moved."""
    datasets = import_torchvision().datasets
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".cifar10-download-", dir=root) as scratch:
            with _network_patience():
                datasets.CIFAR10(scratch, train=True, download=True)
            shutil.move(Path(scratch) / BATCHES_FOLDER, root / BATCHES_FOLDER)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
        for folder in new:
            with suppress(OSError):  # only an empty one goes
                folder.rmdir()
        reason = str(error).rstrip(".") or type(error).__name__
        raise UserError(_not_found(root, f"and could not be downloaded ({reason})")) from error


@contextmanager
def _network_patience() -> Iterator[None]:
    """Give up on a silent network: torchvision's download sets no limit of its own."""
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
