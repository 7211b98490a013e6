"""The API reference builds from the docstrings without a warning, and has all public names."""

import shutil
import subprocess
import sys
from abc import ABCMeta
from pathlib import Path
from types import FunctionType

import pytest

import groupwise.clipping
import groupwise.privacy
from tests.docs.documents import ROOT

KINDS = (type, ABCMeta, FunctionType)


@pytest.mark.slow
def test_reference_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="sphinx is in requirements.txt, and not in this environment")
    ignored = shutil.ignore_patterns("_build", "modules", "__pycache__")
    shutil.copytree(ROOT / "docs" / "api", tmp_path / "docs" / "api", ignore=ignored)
    for folder in ("src", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "docs/api", "html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    guide = (tmp_path / "html" / "index.html").read_text()
    assert guide.index("engine") < guide.index("All modules") and "PoissonSampler" in guide
    for package in (groupwise.clipping, groupwise.privacy):
        page = (tmp_path / "html" / "modules" / f"{package.__name__}.html").read_text()
        public = [name for name in package.__all__ if getattr(package, name).__class__ in KINDS]
        missing = {name for name in public if f'id="{package.__name__}.{name}"' not in page}
        assert missing <= {"explain"}  # a function with the name of its module is on the page of the module
