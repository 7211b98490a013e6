"""Makes notebooks of their scripts, with what they print and draw:  python scripts/notebook.py notebooks/tabular.py

A script has `# %%` above each cell, and is what is edited; the notebook beside it is made. A run's noise is secret, so
numbers differ from one making to the next.
"""

import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode


def notebook_of(script: Path) -> NotebookNode:
    """The cells of a script, without any output; the same for the same script."""
    notebook = jupytext.read(script, fmt="py:percent")
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run its cells from top to bottom in `folder`, and keep what they show; an error in a cell is raised.

    What they write on stderr, progress bars and warnings, is not kept.
    """
    NotebookClient(
        notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": folder}}, record_timing=False
    ).execute()
    notebook.metadata.pop("language_info", None)  # the Python that it was made with
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> int:
    """Make the notebook of each script that is named."""
    for script in map(Path, sys.argv[1:]):
        notebook = notebook_of(script)
        execute(notebook, script.parent)
        jupytext.write(notebook, script.with_suffix(".ipynb"))
        print(f"{script.with_suffix('.ipynb')}: {script.with_suffix('.ipynb').stat().st_size / 1024:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
