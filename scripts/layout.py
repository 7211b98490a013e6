"""Measures the layout of a checkout: files, lines, circles of imports, and what one batch and one configuration touch.

    python scripts/layout.py [CHECKOUT]          this checkout, or another one (say, a worktree of an older commit)

Needs `networkx`, which comes with torch, and the environment of the checkout.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import networkx

BATCH = """
import io, json, runpy, sys, threading
package, told = sys.argv[1], sys.argv[2]
sys.argv = ["run.py", "task=cifar", "clip=adaptive_layer", "scale=smoke", "paths.results=" + sys.argv[3]]
before, batch, inside = set(), set(), 0

def watch(frame, event, argument):
    global inside
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(package):
        return
    step = code.co_qualname == "Trainer.step"
    if event == "call":
        if step:
            inside += 1
            batch.clear()
        (batch if inside else before).add((code.co_filename, code.co_qualname))
    elif step:
        inside -= 1

sys.setprofile(watch)
threading.setprofile(watch)
out, sys.stdout = sys.stdout, io.StringIO()
try:
    runpy.run_path("run.py", run_name="__main__")
except SystemExit:
    pass
finally:
    sys.setprofile(None)
way = {pair for pair in before if not pair[1].startswith("<module>")}
json.dump([[len({file for file, _ in found}), len(found)] for found in (way, batch)], open(told, "w"))
"""


def files_of(root: Path, folder: str, suffix: str) -> list[Path]:
    """Tracked files of a folder that end so."""
    listed = subprocess.run(["git", "-C", root, "ls-files", folder], capture_output=True, text=True, check=True).stdout
    return [root / name for name in listed.splitlines() if name.endswith(suffix)]


def circles(package: Path) -> list[list[str]]:
    """Files that import each other, by any import: at the top, inside a function, or for types alone."""
    modules = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = networkx.DiGraph()
    for module, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found = {name if name in modules else node.module for name in inner}
            else:
                continue
            graph.add_edges_from((module, name) for name in found if name in modules and name != module)
    return [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1]


def touched(root: Path, scratch: Path) -> list[list[int]]:
    """Files and functions of the package from run.py to the first step, and in the last step of a short run."""
    told = scratch / "touched.json"
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", BATCH, str(root / "src" / "groupwise"), str(told), str(scratch / "results")]
    subprocess.run(command, cwd=root, env=environment, check=True, stderr=subprocess.DEVNULL)
    return json.loads(told.read_text())


def main(root: Path, scratch: Path) -> None:
    """Print the figures of the checkout `root`; `scratch` is for a short run."""
    sources = files_of(root, "src/groupwise", ".py")
    lines = sorted(len(file.read_text().splitlines()) for file in sources)
    found = circles(root / "src" / "groupwise")
    way, batch = touched(root, scratch)
    rows = {
        "files in src/groupwise": len(lines),
        "lines": sum(lines),
        "lines of the median file": int(median(lines)),
        "files under 60 lines (without __init__)": sum(
            len(file.read_text().splitlines()) < 60 for file in sources if file.name != "__init__.py"
        ),
        "files over 400 lines": sum(count > 400 for count in lines),
        "circles of imports": len(found),
        "files, functions from run.py to the first step": f"{way[0]}, {way[1]}",
        "files, functions of one batch": f"{batch[0]}, {batch[1]}",
        "files in conf/": len(files_of(root, "conf", ".yaml")),
    }
    for name, value in rows.items():
        print(f"{name:50} {value}")
    for circle in found:
        print("  circle:", ", ".join(circle))


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve(), Path(folder))
