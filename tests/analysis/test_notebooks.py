"""The notebooks in analysis/ run from top to bottom, without a screen; there is one for each table and figure."""

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from groupwise.analysis.results import TABLES

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "analysis").glob("*.py"))
FAST = "table_cifar"
NO_ROWS = "There are no rows"
"""How the sentence begins that a figure without rows is refused with."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem == FAST else pytest.mark.slow) for path in NOTEBOOKS],
)
def test_it_runs(path, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = jupytext.read(path)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    try:
        client.execute()
    except CellExecutionError as error:
        if error.ename == "UserError" and error.evalue.startswith(NO_ROWS):
            pytest.skip(error.evalue)
        raise
    assert any(cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", TABLES)
def test_each_table_has_one_and_it_is_thin(name):
    text = (ROOT / "analysis" / f"table_{name}.py").read_text()
    assert text.startswith("# %% [markdown]\n# # ")
    assert len(text.splitlines()) < 40


def test_there_are_some():
    assert len(NOTEBOOKS) >= len(TABLES)
