"""The API reference: docstrings of the package as HTML.  make api"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import groupwise

project = "groupwise"
version = release = groupwise.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.apidoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_show_copyright = False
apidoc_modules = [
    {
        "path": "../../src/groupwise",
        "destination": "modules",
        "separate_modules": True,
        "module_first": True,
    },
]
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # torch's refer to pages of torch's own
napoleon_use_ivar = True  # a field is described once, where the docstring has it
default_role = "code"  # `name` is code, as in Markdown

# Every reference of a docstring to a name of ours must lead to it; types of other packages are text.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!groupwise\.)[\s\S]*"),
    ("py:class", r"groupwise\..*\.(Backward|Batch|Data|T|_\w+)"),
]  # and TypeVars, and classes that are not shown
suppress_warnings = ["ref.python"]  # a name that is re-exported has two homes: either will do


def as_markup(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Our docstrings are prose: stars and bars are themselves, and what stands in columns stays as it is."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # or napoleon takes what precedes a colon for a type
    text = "\n".join(lines)
    lines[:] = "\n\n".join(map(_paragraph, text.split("\n\n"))).split("\n")


def _paragraph(text: str) -> str:
    if re.search(r"\S {3,}\S", text) or text.startswith("|"):  # in columns, or a table of Markdown
        return "::\n\n" + re.sub("^", "   ", text, flags=re.M)
    parts = re.split(r"(`+[^`]+`+)", text)
    for place, part in enumerate(parts):
        if not part.startswith("`"):
            parts[place] = re.sub(r"(?<!^)(?<!\n)([*|]|(?<=\w)_(?!\w))(?! \w+:)", r"\\\1", part)
        elif place + 1 < len(parts) and re.match(r"[^\s.,;:!?)\]’/-]", parts[place + 1]):
            parts[place] += "\\ "
    return "".join(parts)


def twice(app: Sphinx, what: str, name: str, found: object, skip: bool, options: object) -> bool | None:
    """Leave out what is on another page too: names that an inner package passes on, functions named as their module.

    So are functions of other packages, such as the default of a field.
    """
    here = app.env.current_document.docname.removeprefix("modules/")
    home = getattr(found, "__module__", "") or ""
    if what == "class" and home.startswith("torch."):
        return True
    passed_on = home.startswith("groupwise.") and home != here
    return True if passed_on and (here.count(".") != 1 or home.endswith(f".{name}")) else None


def setup(app: Sphinx) -> None:
    """Before napoleon makes markup of its own."""
    app.connect("autodoc-process-docstring", as_markup, priority=100)
    app.connect("autodoc-skip-member", twice)
