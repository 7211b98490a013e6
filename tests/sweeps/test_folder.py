"""The folder of a sweep is its own."""

import pytest

from groupwise.errors import UserError
from groupwise.sweeps.folder import begin_sweep
from groupwise.sweeps.prepare import PlannedSweep


@pytest.mark.parametrize("cells", [(), None], ids=["our cells", "another sweeper's"])
def test_a_sweep_never_takes_the_folder_of_another(tmp_path, cells):
    planned = PlannedSweep("table", "mini", tmp_path / "results/sweeps/now-table", cells)
    assert begin_sweep(planned) == planned.folder
    assert (planned.folder / "cells.json").is_file() == (cells is not None)
    with pytest.raises(UserError, match="cannot be written"):
        begin_sweep(planned)


def test_a_folder_that_holds_no_sweep_yet_is_taken_as_it_is(tmp_path):
    assert begin_sweep(PlannedSweep("table", "mini", tmp_path, ())) == tmp_path


def test_a_file_in_its_place_is_a_sentence(tmp_path):
    (tmp_path / "sweep").touch()
    with pytest.raises(UserError, match="cannot be written"):
        begin_sweep(PlannedSweep("table", "mini", tmp_path / "sweep", ()))
