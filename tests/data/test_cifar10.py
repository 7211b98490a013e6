"""The search order of CIFAR-10 layouts, and the download if there is none."""

import functools
import hashlib
import shutil
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from groupwise.data.cifar10 import load_cifar10
from groupwise.torchvision_import import import_torchvision
from tests.data.refusals import refused

LAYOUTS = ("cifar-10-batches-py/", "cifar10/train_shard0.webp")


def test_standard_folder_comes_first(tmp_path, make_batches):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test.webp").touch()
    make_batches(tmp_path)
    assert load_cifar10(tmp_path).source == "CIFAR-10, the standard folder"


def test_broken_layout_is_refused(tmp_path):
    """Using another copy silently would train on other data than the user expects."""
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert "cifar-10-batches-py is incomplete" in refused(load_cifar10, tmp_path)
    (tmp_path / "other" / "cifar10").mkdir(parents=True)
    (tmp_path / "other" / "cifar10" / "train_shard2.webp").touch()
    assert "train_shard0.webp is missing" in refused(load_cifar10, tmp_path / "other")


def test_failed_download_names_both_layouts(tmp_path):
    message = refused(load_cifar10, tmp_path / "deep" / "root")
    assert "could not be downloaded" in message
    assert str(tmp_path) in message
    assert all(layout in message for layout in LAYOUTS)
    assert list(tmp_path.iterdir()) == []


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        """Do not log requests."""


@pytest.fixture
def served(tmp_path, make_batches, monkeypatch):
    """A small archive on a local server, which torchvision accepts as the published one."""
    make_batches(tmp_path / "server")
    archive = tmp_path / "server" / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "server" / "cifar-10-batches-py", "cifar-10-batches-py")
    cifar10 = import_torchvision().datasets.CIFAR10
    monkeypatch.setattr(cifar10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    handler = functools.partial(QuietHandler, directory=archive.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(cifar10, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
        yield archive
        server.shutdown()


def test_download_becomes_the_standard_folder(tmp_path, served):
    root = tmp_path / "deep" / "root"
    assert load_cifar10(root).x_train.shape == (50, 3, 32, 32)
    shutil.rmtree(served.parent)
    assert load_cifar10(root).x_test.shape == (10, 3, 32, 32)


def test_one_of_several_jobs_downloads_and_the_others_wait(tmp_path, served, monkeypatch):
    datasets, fetched = import_torchvision().datasets, []
    fetch = datasets.cifar.download_and_extract_archive
    monkeypatch.setattr(
        datasets.cifar, "download_and_extract_archive", lambda *a, **options: (fetched.append(a), fetch(*a, **options))
    )
    with ThreadPoolExecutor(3) as jobs:
        sizes = [len(data.x_train) for data in jobs.map(load_cifar10, [tmp_path / "root"] * 3)]
    assert (sizes, len(fetched)) == ([50] * 3, 1)


def test_broken_download_is_refused(tmp_path, served):
    served.write_bytes(served.read_bytes()[:2000])
    assert "could not be downloaded" in refused(load_cifar10, tmp_path / "deep" / "root")
