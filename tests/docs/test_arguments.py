"""The documented table of arguments of `make_private` matches its signature."""

import ast
import inspect
import re

from groupwise import make_private
from tests.docs.documents import ROOT


def test_table_of_arguments_matches_the_signature() -> None:
    table = (ROOT / "docs" / "loop.md").read_text().partition("## What `make_private` takes")[2]
    documented = {
        name: ast.literal_eval(default.strip("` ")) if default.strip() else inspect.Parameter.empty
        for names, default in re.findall(r"^\| (`.*?) \|(.*?)\|", table, re.M)
        for name in re.findall(r"`\**(\w+)`", names)
    }
    signature = inspect.signature(make_private).parameters.values()
    assert list(documented.items()) == [(parameter.name, parameter.default) for parameter in signature]
