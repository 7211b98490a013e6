"""No file of clipping imports, by way of others, itself: not lazily and not for types alone either."""

import ast
from pathlib import Path

import groupwise.clipping

ROOT = Path(groupwise.clipping.__file__).parent
PACKAGE = "groupwise.clipping"


def name_of(file: Path) -> str:
    return ".".join((PACKAGE, *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(file): file for file in ROOT.rglob("*.py")}


def imported(text: str) -> set[str]:
    """The modules of clipping that a file names in any import statement, at whatever depth."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= submodules or {node.module}
    return found & MODULES.keys()


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """A way through the graph that comes back to where it was, or None."""
    done: set[str] = set()

    def search(module: str, way: list[str]) -> list[str] | None:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return None
        for following in sorted(graph[module]):
            if (found := search(following, [*way, module])) is not None:
                return found
        done.add(module)
        return None

    return next((found for module in sorted(graph) if (found := search(module, [])) is not None), None)


def test_there_is_none():
    assert circle({name: imported(file.read_text()) for name, file in MODULES.items()}) is None


def test_one_would_be_seen():
    lazy = "def f():\n    from groupwise.clipping import engine\n"
    assert imported(lazy) == {f"{PACKAGE}.engine"}
    typed = "if TYPE_CHECKING:\n    from groupwise.clipping.engine import ClippingEngine\n"
    assert imported(typed) == {f"{PACKAGE}.engine"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
