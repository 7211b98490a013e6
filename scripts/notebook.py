"""Converts scripts to executed notebooks:  python scripts/notebook.py notebooks/tabular.py

Edit the script, in which `# %%` starts a cell; the notebook beside it is generated. The noise of a run is secret, so
numbers differ each time.
"""

import argparse
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode


def notebook_of(script: Path) -> NotebookNode:
    """The cells of a script without output; deterministic."""
    notebook = jupytext.read(script, fmt="py:percent")
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run the cells from top to bottom in `folder`, and keep their output; an error in a cell is raised.

    Progress bars and warnings on stderr are not kept.
    """
    NotebookClient(
        notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": folder}}, record_timing=False
    ).execute()
    notebook.metadata.pop("language_info", None)  # names the Python version
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> int:
    """Convert each script of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scripts", nargs="+", type=Path, help="such as notebooks/tabular.py")
    for script in parser.parse_args().scripts:
        notebook = notebook_of(script)
        execute(notebook, script.parent)
        jupytext.write(notebook, script.with_suffix(".ipynb"))
        print(f"{script.with_suffix('.ipynb')}: {script.with_suffix('.ipynb').stat().st_size / 1024:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
