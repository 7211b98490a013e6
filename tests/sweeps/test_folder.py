"""Sweeps that start in the same second have separate folders."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from omegaconf import DictConfig

from groupwise.errors import UserError
from groupwise.sweeps.folder import begin_sweep
from groupwise.sweeps.prepare import PlannedSweep

AT_ONCE = 8
HYDRA = DictConfig({})


@pytest.mark.parametrize("cells", [(), None], ids=["our cells", "another sweeper's"])
def test_simultaneous_sweeps_have_separate_folders(tmp_path, cells):
    planned = PlannedSweep("table", "mini", tmp_path / "results/sweeps/now-table", cells, HYDRA)
    ready = Barrier(AT_ONCE)

    def begin(_):
        ready.wait()
        return begin_sweep(planned)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        folders = list(threads.map(begin, range(AT_ONCE)))
    names = ["now-table", *(f"now-table-{number}" for number in range(2, AT_ONCE + 1))]
    assert sorted(folder.name for folder in folders) == sorted(names)
    assert all((folder / "cells.json").is_file() == (cells is not None) for folder in folders)


def test_folder_without_a_sweep_is_used(tmp_path):
    assert begin_sweep(PlannedSweep("table", "mini", tmp_path, (), HYDRA)) == tmp_path


def test_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "sweep").touch()
    with pytest.raises(UserError, match="cannot be written"):
        begin_sweep(PlannedSweep("table", "mini", tmp_path / "sweep", (), HYDRA))
