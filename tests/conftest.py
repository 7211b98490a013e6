"""Shared by all tests."""

import functools
import gc
import os
import sys
from contextlib import ExitStack

import pytest

sys.dont_write_bytecode = False  # in containers it often is True, and every worker would compile everything again


gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported until tests begin stays, and is not looked through for garbage, neither then nor later; what
    tests make is looked through a hundredth as often as usual, which took a tenth of their time."""
    try:
        return (yield)
    finally:
        gc.set_threshold(500_000, 10, 10)
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_cache(tmp_path_factory):
    """Features that are cached are computed once, by whichever worker comes first, and by no earlier session."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # every worker has its own below it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPWISE_CACHE", str(folder / "cache"))
        if rdp := sys.modules.get("dp_accounting.rdp.rdp_privacy_accountant"):  # the same binomials for every noise
            patch.setattr(rdp, "_log_comb", functools.cache(rdp._log_comb))
        patch.setattr(os, "fsync", lambda descriptor: None)  # no test cuts the power
        with ExitStack() as made_up:
            if "groupwise.tasks.text_generation" in sys.modules:  # what is not imported makes up nothing
                from tests.made_up import made_up_once

                made_up.enter_context(made_up_once())
            yield


@pytest.fixture(autouse=True)
def _as_many_threads_as_before():
    """Commands compute on one thread, and set that for the whole process."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if before and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def every_tracker_is_installed(monkeypatch):
    """Configurations with any tracker are valid, whether its package is installed or not."""
    monkeypatch.setattr("groupwise.config.checks.find_spec", lambda name: name)


@pytest.fixture(scope="module")
def few_objects():
    """Only what is made from here on is looked through each time that a test asks for garbage."""
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
    """The engine does on the CPU what it does on a GPU: small operations for several groups, and no look at values."""
    for module in ("factors", "norm_terms", "groups", "thresholds_and_counts"):
        monkeypatch.setattr(f"groupwise.clipping.{module}.is_async_device", lambda t: True)
