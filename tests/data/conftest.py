"""Small synthetic CIFAR-10 folders, and the folder of the real data sets."""

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from groupwise.torchvision_import import import_torchvision

TRAIN_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Downloads fail at once, as nothing listens on this local port."""
    monkeypatch.setenv("no_proxy", "*")
    cifar10 = import_torchvision().datasets.CIFAR10
    monkeypatch.setattr(cifar10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")


@pytest.fixture
def real_data() -> Path:
    """The folder of the published data sets; skips the test without it."""
    if "GROUPWISE_DATA" not in os.environ:
        pytest.skip("GROUPWISE_DATA (a folder with cifar10/, glue/, e2e/, dart/ and samsum/) is not set")
    return Path(os.environ["GROUPWISE_DATA"])


@pytest.fixture
def make_batches(monkeypatch):
    """A function that writes a small standard folder and makes torchvision expect its MD5 sums."""

    def make(root: Path, **changes: object) -> Path:
        folder = root / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        generator = np.random.default_rng(1)
        sums = {}
        for name in [*TRAIN_BATCHES, "test_batch", "batches.meta"]:
            content: dict[str, object] = {
                "data": generator.integers(0, 256, (10, 3072), dtype=np.uint8),
                "labels": list(range(10)),
            }
            if name == "batches.meta":
                content = {"label_names": [f"class {label}" for label in range(10)]}
            elif name == "data_batch_3":
                content.update(changes)
            (folder / name).write_bytes(pickle.dumps(content))
            sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
        cifar10 = import_torchvision().datasets.CIFAR10
        monkeypatch.setattr(cifar10, "train_list", [[name, sums[name]] for name in TRAIN_BATCHES])
        monkeypatch.setattr(cifar10, "test_list", [["test_batch", sums["test_batch"]]])
        monkeypatch.setattr(cifar10, "meta", {**cifar10.meta, "md5": sums["batches.meta"]})
        return folder

    return make
