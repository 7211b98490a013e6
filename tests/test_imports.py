"""Imports follow the order of the layers, `clipping` and `privacy` can be imported alone, and files are short."""

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
"""The layers: a package may import itself and the packages of the layers above it in this list."""
ALONE = {
    "clipping": {"errors"},
    "privacy": {"errors", "options"},
    "data": {"atomic", "cache", "errors", "torchvision_import"},
    "metrics": {"errors"},
}
"""The only packages that these may import besides themselves."""
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
def test_packages_import_only_from_the_layers_above(package):
    for file in SOURCE.rglob("*.py"):
        if file != SOURCE / "__init__.py" and package_of(file) == package:
            found = {name.split(".")[1] for name in imported(file) if name.startswith("groupwise.")}
            assert found <= may_import(package), file


@pytest.mark.parametrize("package", [SOURCE, ROOT / "trust", ROOT / "benchmarks"], ids=lambda package: package.name)
def test_there_is_no_import_cycle_not_even_of_lazy_or_type_only_imports(package):
    files = {module_of(file, package): file for file in package.rglob("*.py")}
    TopologicalSorter({module: needs(module, files) for module in files}).prepare()  # raises CycleError


def test_no_file_has_more_than_400_lines():
    lengths = {file: len(file.read_text().splitlines()) for file in SOURCE.rglob("*.py")}
    assert len(lengths) > 100 and not [str(file) for file, lines in lengths.items() if lines > 400]


def module_of(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def needs(module: str, files: dict[str, Path]) -> set[str]:
    """The modules among `files` that this module imports, at any place in its code."""
    found = set()
    for node in ast.walk(ast.parse(files[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in files else node.module for name in inner}
    return (found & set(files)) - {module}


NEVER_LOADS = {
    "groupwise.clipping": {"hydra", "omegaconf", "numpy.random", "pandas", "scipy", "torchvision", "prv_accountant"},
    "groupwise.privacy": {
        *("hydra", "omegaconf", "pandas", "scipy", "torchvision"),
        *("prv_accountant", "dp_accounting"),  # loaded at their first use
    },
    "groupwise.training.reports": {"wandb", "tensorboard"},
    "groupwise.run, groupwise.tasks.image_classification": {
        *("transformers", "peft", "datasets", "torch.distributed.pipelining")
    },
}
"""Libraries, and modules that importing them must not load; torch is loaded before."""
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
def loaded() -> dict[str, set[str]]:
    """The modules that importing each library of `NEVER_LOADS` loads, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", IN_FORKS, *NEVER_LOADS], capture_output=True, text=True, check=True)
    return {library: set(names) for library, *names in (line.split("|") for line in done.stdout.splitlines())}


@pytest.mark.parametrize("library", NEVER_LOADS)
def test_a_library_does_not_load_what_it_does_not_need(loaded, library):
    assert set(library.split(", ")) <= loaded[library]
    assert not NEVER_LOADS[library] & loaded[library]


def test_starting_processes_and_submitting_jobs_does_not_load_torch():
    """A SIGTERM while torch loads would kill a started process; a process that only watches would hold its memory."""
    code = "import sys, groupwise.processes.start, groupwise.sweeps.slurm; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "groupwise.run"} & set(loaded)


def test_no_private_module_of_hydra_is_imported():
    for file in SOURCE.rglob("*.py"):
        assert "hydra._internal" not in file.read_text(encoding="utf-8"), file
