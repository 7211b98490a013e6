"""Fixtures and hooks shared by all tests."""

import functools
import gc
import os
import sys
from contextlib import ExitStack

import pytest

sys.dont_write_bytecode = False  # often True in containers, where every worker would then compile all modules
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads, and without a network the hub is tried for 23 s


gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude all that is imported before the tests from garbage collection, and collect a hundred times less often
    than by default, because the collector took a tenth of the tests' time."""
    try:
        return (yield)
    finally:
        gc.set_threshold(500_000, 10, 10)
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_cache(tmp_path_factory):
    """All workers of a session share one cache folder, which no other session uses."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has a folder of its own inside it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPWISE_CACHE", str(folder / "cache"))
        if rdp := sys.modules.get("dp_accounting.rdp.rdp_privacy_accountant"):  # the same for every noise multiplier
            patch.setattr(rdp, "_log_comb", functools.cache(rdp._log_comb))
        patch.setattr(os, "fsync", lambda descriptor: None)  # no test simulates a power failure
        with ExitStack() as stack:
            if "groupwise.tasks.text_generation" in sys.modules:  # otherwise no test needs synthetic texts
                from tests.made_up import made_up_once

                stack.enter_context(made_up_once())
            yield


@pytest.fixture(autouse=True)
def _restore_num_threads():
    """Commands set torch to one thread for the whole process."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if before and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def every_tracker_is_installed(monkeypatch):
    """Every tracker's package counts as installed, so that configurations with any tracker are valid."""
    monkeypatch.setattr("groupwise.config.checks.find_spec", lambda name: name)


@pytest.fixture(scope="module")
def few_objects():
    """Exclude all objects that exist now from garbage collection, which makes `gc.collect` fast."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GROUPWISE_CACHE", str(folder))
    return folder


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The engine takes its GPU path on the CPU: operations over several groups at once, and no synchronising reads."""
    for module in ("factors", "norm_terms", "groups", "thresholds_and_counts"):
        monkeypatch.setattr(f"groupwise.clipping.{module}.is_async_device", lambda t: True)
