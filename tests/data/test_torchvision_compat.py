"""torchvision imports beside this torch, whichever it is, and is left alone where it needs no help."""

import importlib
import os
import subprocess
import sys
import types

import pytest
import torch

from groupwise.data import cifar10
from groupwise.data.cifar10 import import_torchvision

FRESH_PROCESS = """
from groupwise.data.cifar10 import import_torchvision
torchvision = import_torchvision()
assert torchvision.datasets.CIFAR10 and torchvision.transforms.functional.hflip
assert import_torchvision() is torchvision
import torchvision as again
assert again is torchvision
print("imported", torchvision.__version__)
"""


def test_it_imports_in_a_fresh_process_beside_the_installed_torch():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FRESH_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported")


def test_nothing_is_declared_where_it_imports_by_itself(monkeypatch):
    module = types.ModuleType("torchvision")
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(torch.library, "Library", lambda *_: pytest.fail("an operator was declared"))
    before = list(cifar10._declared)
    assert import_torchvision() is module
    assert cifar10._declared == before


@pytest.mark.parametrize("error", [RuntimeError("CUDA versions differ"), ImportError("no torchvision")])
def test_another_failure_is_not_hidden(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(type(error), match=str(error)):
        import_torchvision()
