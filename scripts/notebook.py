"""Makes a notebook of an example, with what it prints:  python scripts/notebook.py examples/own_model.py

The docstring becomes the text on top, every paragraph a cell. The notebook lies beside the script, which is what is
edited. A run's noise is secret, so numbers differ from one making to the next.
"""

import ast
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell


def notebook_of(script: Path) -> NotebookNode:
    """The cells of a script, without any output; the same for the same script."""
    text = script.read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt="py:light")
    title, _, rest = (ast.get_docstring(ast.parse(text)) or script.stem).partition("\n")
    notebook.cells[0] = new_markdown_cell(f"# {title.rstrip('.')}\n{rest}".rstrip())
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run its cells from top to bottom in `folder`, and keep what they print; an error in a cell is raised."""
    NotebookClient(
        notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": folder}}, record_timing=False
    ).execute()
    notebook.metadata.pop("language_info", None)  # the Python that it was made with


def main() -> int:
    """Make the notebook of each script that is named."""
    for script in map(Path, sys.argv[1:]):
        notebook = notebook_of(script)
        execute(notebook, script.parent)
        jupytext.write(notebook, script.with_suffix(".ipynb"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
