"""`import_torchvision` declares missing operators only where torchvision does not import by itself."""

import importlib.util
import sys
import types

import pytest
import torch

from groupwise import torchvision_import
from groupwise.torchvision_import import import_torchvision, import_torchvision_first


def test_nothing_is_declared_where_it_imports_by_itself(monkeypatch):
    module = types.ModuleType("torchvision")
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(torch.library, "Library", lambda *_: pytest.fail("an operator was declared"))
    before = list(torchvision_import._declared)
    assert import_torchvision() is module
    assert torchvision_import._declared == before


@pytest.mark.parametrize("error", [RuntimeError("CUDA versions differ"), ImportError("no torchvision")])
def test_other_errors_of_the_import_are_raised(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(type(error), match=str(error)) as caught:
        import_torchvision()
    assert isinstance(error, ImportError) or "both of one build" in str(caught.value)


@pytest.mark.parametrize("there", [True, False])
def test_torchvision_is_imported_first_where_it_is_installed(monkeypatch, there):
    imported = []
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there or None)
    monkeypatch.setattr(importlib, "import_module", imported.append)
    import_torchvision_first()
    assert imported == ["torchvision"] * there
