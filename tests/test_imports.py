"""Imports point one way, the two libraries inside can be taken alone, and no file is longer than one sitting."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "groupwise"
ORDER = (
    {"errors", "atomic", "checkout"},
    {"cache", "metrics", "options", "rows", "torchvision_import"},
    {"config", "clipping", "privacy", "data"},
    {"models", "training"},
    {"tasks", "private"},
    {"pipeline", "integrations"},
    {"build", "planner"},
    {"run"},
    {"processes"},
    {"sweeps"},
    {"audit", "analysis", "cli"},
)
"""Each may import what stands above it, and itself."""
ALONE = {
    "clipping": {"errors"},
    "privacy": {"errors", "options"},
    "data": {"atomic", "cache", "errors", "torchvision_import"},
    "metrics": {"errors"},
}
"""What these may import besides themselves."""
BESIDE = {
    "config": {"rows", "atomic", "errors"},
    "analysis": {"sweeps", "rows", "training", "config", "atomic", "checkout", "errors"},
}


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).with_suffix("").parts[0]


def may_import(package: str) -> set[str]:
    if package in ALONE or package in BESIDE:
        return {package, *(ALONE | BESIDE)[package]}
    level = next(number for number, packages in enumerate(ORDER) if package in packages)
    return {package}.union(*ORDER[:level])


@pytest.mark.parametrize("package", sorted(set().union(*ORDER)))
def test_imports_point_one_way(package):
    for file in SOURCE.rglob("*.py"):
        if file != SOURCE / "__init__.py" and package_of(file) == package:
            found = {name.split(".")[1] for name in imported(file) if name.startswith("groupwise.")}
            assert found <= may_import(package), file


@pytest.mark.parametrize("package", [SOURCE, ROOT / "trust", ROOT / "benchmarks"], ids=lambda package: package.name)
def test_no_circle_of_imports_not_even_a_lazy_or_type_only_one(package):
    files = {module_of(file, package): file for file in package.rglob("*.py")}
    TopologicalSorter({module: needs(module, files) for module in files}).prepare()  # raises CycleError


def test_no_file_has_more_than_400_lines():
    lengths = {file: len(file.read_text().splitlines()) for file in SOURCE.rglob("*.py")}
    assert len(lengths) > 100 and not [str(file) for file, lines in lengths.items() if lines > 400]


def module_of(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def needs(module: str, files: dict[str, Path]) -> set[str]:
    """The files that an import anywhere in it names; a package's own `__init__` is no import of its files."""
    found = set()
    for node in ast.walk(ast.parse(files[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in files else node.module for name in inner}
    return (found & set(files)) - {module}


NEVER_BRINGS = {
    "groupwise.clipping": {"hydra", "omegaconf", "numpy.random", "pandas", "scipy", "torchvision", "prv_accountant"},
    "groupwise.privacy": {
        *("hydra", "omegaconf", "pandas", "scipy", "torchvision"),
        *("prv_accountant", "dp_accounting"),  # they load when they are first asked
    },
    "groupwise.training.reports": {"wandb", "tensorboard"},
    "groupwise.run, groupwise.tasks.image_classification": {
        *("transformers", "peft", "datasets", "torch.distributed.pipelining")
    },
}
"""What is imported, and what that never brings; torch is there already."""
IN_FORKS = """
import os, sys, torch
before = set(sys.modules)
for library in sys.argv[1:]:
    if os.fork() == 0:
        try:
            exec("import " + library)
            print(library, *(set(sys.modules) - before), sep="|", flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def brought() -> dict[str, set[str]]:
    """What each of `NEVER_BRINGS` brings, in a process of its own."""
    told = subprocess.run([sys.executable, "-c", IN_FORKS, *NEVER_BRINGS], capture_output=True, text=True, check=True)
    return {library: set(names) for library, *names in (line.split("|") for line in told.stdout.splitlines())}


@pytest.mark.parametrize("library", NEVER_BRINGS)
def test_a_library_taken_alone_brings_nothing_else(brought, library):
    assert set(library.split(", ")) <= brought[library]
    assert not NEVER_BRINGS[library] & brought[library]


def test_what_starts_and_watches_processes_brings_no_torch():
    """A started process would die of a SIGTERM while torch loads; who submits jobs or watches would hold its memory."""
    code = "import sys, groupwise.processes.start, groupwise.sweeps.slurm; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "groupwise.run"} & set(loaded)


def test_nothing_private_of_hydra_is_imported():
    for file in SOURCE.rglob("*.py"):
        assert "hydra._internal" not in file.read_text(encoding="utf-8"), file
