"""Declared requirements match the imports, the wheel is complete, and the library works without its extras."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import groupwise
from tests.test_imports import imported as names_in

distributions_of_packages = cache(packages_distributions)  # reads the metadata of all installed packages
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
LIGHT = (
    *("clipping", "privacy", "private", "errors.py", "cache.py", "atomic.py", "__init__.py", "config/schema.py"),
    *("training/mechanism.py", "training/from_config.py", "training/ranks.py"),
)
"""What `pip install .` alone must be able to import."""
OURS = {"groupwise", "tests", "trust", "benchmarks", "scripts", "run"}
FOREIGN = "small_models_jax.py"
"""Runs in an environment of its own."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def declared(*extras: str) -> set[str]:
    """Distributions that come with the package and these extras."""
    optional = project()["optional-dependencies"]
    return names(project()["dependencies"]).union(*(names(optional[extra]) for extra in extras))


def imported(files: list[Path]) -> set[str]:
    """Packages outside of the standard library and this project that these files import."""
    found = {name.partition(".")[0] for file in files for name in names_in(file)}
    return found - set(sys.stdlib_module_names) - OURS


def undeclared(packages: set[str], distributions: set[str]) -> set[str]:
    """Those of `packages` that none of `distributions` provides."""
    known = distributions_of_packages()
    return {name for name in packages if not {canonicalize_name(d) for d in known.get(name, [name])} & distributions}


def files_of(*folders: str) -> list[Path]:
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def test_all_imports_of_the_library_are_required_packages() -> None:
    package = SOURCE / "groupwise"
    light = [file for name in LIGHT for file in (package.glob(name) if "." in name else (package / name).rglob("*.py"))]
    assert len(light) > 30
    assert undeclared(imported(light), declared("secure")) == set()


def test_all_imports_of_the_suite_are_declared() -> None:
    assert undeclared(imported(files_of("src")), declared("suite", "language", "secure", "mlflow")) == set()


def test_all_imports_of_tests_and_scripts_are_declared() -> None:
    everything = declared("suite", "language", "secure", "mlflow", "dev")
    files = files_of("tests", "trust", "benchmarks", "examples", "notebooks", "analysis")
    assert undeclared(imported([file for file in files if file.name != FOREIGN]), everything) == set()


def test_extras_and_pins_name_the_same_packages() -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert declared("suite", "language", "secure", "dev") - {"groupwise"} == names([line for line in lines if line])


def test_torch_and_torchvision_are_pinned_to_matching_versions() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M))
    try:
        needed = [Requirement(line) for line in requires("torchvision") or []]
    except PackageNotFoundError:
        pytest.skip("torchvision is in requirements.txt, and not in this environment")
    [torch] = [requirement for requirement in needed if requirement.name == "torch"]
    assert torch.specifier.contains(pins["torch"])


def test_the_version_matches_the_changelog_and_the_citation() -> None:
    released = re.findall(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0][0] == groupwise.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == released[0]
    assert citation["license"] == project()["license"]


def test_the_workflow_runs_existing_targets_and_files() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [line for step in steps for line in step.get("run", "").splitlines()]
    assert ".ci/run" in commands
    for command in commands:
        program, *words = command.split()
        assert (words and set(words) <= set(targets)) if program == "make" else (ROOT / program).is_file(), command
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions and all(v in SpecifierSet(project()["requires-python"]) for v in versions)


def test_hooks_run_the_pinned_ruff() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M))
    assert repository["rev"] == f"v{pins['ruff']}"
    assert {hook["id"] for hook in repository["hooks"]} == {"ruff-check"}


BLOCKED = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
STEP = """
import torch
import groupwise

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
before = [parameter.detach().clone() for parameter in model.parameters()]
x, y = torch.randn(64, 4), torch.randint(2, (64,))
losses = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
optimizer, data = torch.optim.SGD(model.parameters(), lr=1.0), torch.utils.data.TensorDataset(x, y)
private = groupwise.make_private(
    model, optimizer, data, losses, epsilon=8, delta=1e-3, steps=2, batch_size=16, accountant="rdp"
)
assert [step.number for step in private.steps()] == [1, 2]
assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))
print("trained", private.epsilon)
"""


def modules_beyond_the_library() -> set[str]:
    """Import names of packages that the extras install and the library itself does not."""
    beyond = declared("suite", "language", "secure", "dev") - declared() - {"groupwise", "packaging", "setuptools"}
    return {
        name for name, given in distributions_of_packages().items() if {canonicalize_name(d) for d in given} <= beyond
    }


def run(code: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {str(path)!r})\n"
    command = [sys.executable, "-c", start + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_library_trains_where_no_extra_is_installed(tmp_path: Path) -> None:
    blocked = modules_beyond_the_library()
    assert {"hydra", "omegaconf", "pandas", "yaml"} <= blocked
    done = run(BLOCKED.format(blocked=blocked) + STEP, tmp_path, SOURCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained ")


def test_run_py_without_the_suite_says_what_to_install(tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "run.py", tmp_path)
    code = f"import runpy; sys.argv = ['run.py']; runpy.run_path({str(script)!r}, run_name='__main__')"
    for advice in ("[suite,language]", ". .venv/bin/activate"):  # without and with the environment of `make env`
        done = run(BLOCKED.format(blocked={"hydra"}) + code, tmp_path, SOURCE)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: run.py needs hydra, ")
        assert len(done.stderr.splitlines()) == 1 and advice in done.stderr
        (tmp_path / ".venv").mkdir(exist_ok=True)
        (tmp_path / ".venv" / ".complete").touch()


@pytest.mark.slow
def test_a_wheel_is_built_offline_contains_all_files_and_trains(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "*.so")
    shutil.copytree(SOURCE, copy / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    build = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"groupwise-{groupwise.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        archived = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    needed = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*")
        if file.is_file() and not {"__pycache__", "groupwise.egg-info"} & set(file.relative_to(SOURCE).parts)
        if file.suffix != ".so"
    }
    assert "groupwise/py.typed" in needed and "groupwise/data/synthetic/reviews.yaml" in needed
    assert needed <= archived, sorted(needed - archived)
    assert shutil.which("cc") is None or [name for name in archived if name.startswith("groupwise/privacy/_normals.")]
    done = run(BLOCKED.format(blocked=modules_beyond_the_library()) + STEP, tmp_path, tmp_path / "installed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained ")
