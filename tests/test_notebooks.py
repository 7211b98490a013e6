"""Each notebook equals its script, was run to the end, is small, shows no path of a machine, and runs again."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jupytext
import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted([*(ROOT / "notebooks").glob("*.py"), *(ROOT / "analysis").glob("*.py")])
LARGEST = 150 * 1024
pytestmark = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@pytest.fixture
def maker() -> ModuleType:
    """`scripts/notebook.py`, which makes the notebooks, as a module."""
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "scripts" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> Iterator[str]:
    """All texts in the notebook's outputs."""
    for cell in code(notebook):
        for output in cell.outputs:
            yield output.get("text", "")
            yield from (text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


def test_a_notebook_equals_its_script_and_has_outputs_without_errors(maker, script):
    built, committed = maker.notebook_of(script), jupytext.read(script.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in built.cells] == [
        (cell.cell_type, cell.source) for cell in committed.cells
    ], "make notebooks makes it again"
    assert [cell.execution_count for cell in code(committed)] == list(range(1, len(code(committed)) + 1))
    kinds = [output.output_type for cell in code(committed) for output in cell.outputs]
    assert (
        kinds
        and "error" not in kinds
        and all(output.get("name") != "stderr" for cell in code(committed) for output in cell.outputs)
    )
    assert script.with_suffix(".ipynb").stat().st_size <= LARGEST
    assert not re.search(r"/home/|/tmp/|/root/|/work/", "\n".join(texts(committed)))


def test_all_imports_of_a_notebook_exist(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("groupwise"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, each.name) or _is_module(f"{node.module}.{each.name}") for each in node.names)
        elif isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(name.name.partition(".")[0]) for name in node.names)


def _is_module(name):
    return importlib.util.find_spec(name) is not None


def test_all_links_of_a_notebook_resolve(maker, script):
    prose = "\n".join(cell.source for cell in maker.notebook_of(script).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        assert target.startswith("https://") or (script.parent / target).exists(), target


@pytest.mark.slow
def test_a_notebook_runs(maker, script, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("MODEL", str(ROOT / "pretrained" / "roberta_mini"))
    notebook = maker.notebook_of(script)
    maker.execute(notebook, tmp_path)
    output = "\n".join(texts(notebook))
    for accuracy, epsilon in re.findall(r"accuracy ([\d.]+) at epsilon ([\d.]+)", output):
        assert float(accuracy) >= 0.88 and 7.9 < float(epsilon) <= 8
