"""Imports point one way, and the two libraries inside can be taken alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "groupwise"
MAY_IMPORT = {
    "clipping": {"clipping", "cache", "errors"},
    "privacy": {"privacy", "cache", "errors"},
    "models": {"models", "clipping", "config", "data", "errors", "suggestions"},
    "data": {"data", "errors"},
    "training": {"training", "clipping", "privacy", "config", "atomic", "errors"},
    "metrics": {"metrics", "errors"},
    "tasks": {"tasks", "training", "models", "data", "metrics", "config", "atomic", "errors"},
    "pipeline": {
        "pipeline",
        "clipping",
        "privacy",
        "training",
        "tasks",
        "models",
        "data",
        "config",
        "atomic",
        "errors",
        "suggestions",
    },
    "analysis": {"analysis", "cells", "training", "atomic", "errors"},
    "audit": {
        "audit",
        "launch",
        "pipeline",
        "tasks",
        "training",
        "privacy",
        "clipping",
        "data",
        "config",
        "atomic",
        "errors",
    },
}
COMMANDS = {SOURCE / "privacy" / "audit" / "__main__.py": {"audit"}}
"""Files that only call another room."""


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room):
    for file in (SOURCE / room).rglob("*.py"):
        rooms = {name.split(".")[1] for name in imported(file) if name.startswith("groupwise.")}
        assert rooms <= COMMANDS.get(file, MAY_IMPORT[room]), file


@pytest.mark.parametrize(
    ("library", "never"),
    [
        (
            "groupwise.clipping",
            {"hydra", "omegaconf", "numpy.random", "pandas", "scipy", "torchvision", "prv_accountant"},
        ),
        ("groupwise.privacy", {"hydra", "omegaconf", "pandas", "torchvision", "prv_accountant", "dp_accounting"}),
    ],
)
def test_a_library_taken_alone_brings_nothing_else(library, never):
    code = f"import torch, sys; before = set(sys.modules); import {library}; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not never & set(loaded)
