"""Sweeps that begin in the same second keep apart."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from groupwise.errors import UserError
from groupwise.sweeps.folder import begin_sweep
from groupwise.sweeps.prepare import PlannedSweep

AT_ONCE = 8


@pytest.mark.parametrize("cells", [(), None], ids=["our cells", "another sweeper's"])
def test_sweeps_of_one_second_have_folders_of_their_own(tmp_path, cells):
    planned, ready = PlannedSweep("table", "mini", tmp_path / "results/sweeps/now-table", cells), Barrier(AT_ONCE)

    def begin(_):
        ready.wait()
        return begin_sweep(planned)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        folders = list(threads.map(begin, range(AT_ONCE)))
    names = ["now-table", *(f"now-table-{number}" for number in range(2, AT_ONCE + 1))]
    assert sorted(folder.name for folder in folders) == sorted(names)
    assert all((folder / "cells.json").is_file() == (cells is not None) for folder in folders)


def test_a_folder_that_holds_no_sweep_yet_is_taken_as_it_is(tmp_path):
    assert begin_sweep(PlannedSweep("table", "mini", tmp_path, ())) == tmp_path


def test_a_file_in_its_place_is_a_sentence(tmp_path):
    (tmp_path / "sweep").touch()
    with pytest.raises(UserError, match="cannot be written"):
        begin_sweep(PlannedSweep("table", "mini", tmp_path / "sweep", ()))
