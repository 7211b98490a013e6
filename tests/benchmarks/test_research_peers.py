"""fastDP and private-transformers are taken from a folder and left as they are; here small stand-ins of theirs."""

import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import research_peers
from benchmarks.methods import make
from benchmarks.throughput import Options, main
from benchmarks.workloads import build
from groupwise.errors import UserError

HOOKS = '''
import torch
from . import autograd_grad_sample, transformers_support


class PrivacyEngine:
    """Sums that are not clipped, noise as theirs; parameters that `origin_params` do not name lose requires_grad."""

    def __init__(self, module, *, origin_params, noise_multiplier, max_grad_norm, clipping_style, **options):
        print("talks")
        transformers_support.forward_swapper(module)
        for name, parameter in list(module.named_parameters())[{skipped}:]:
            parameter.noise = noise_multiplier * max_grad_norm
            parameter.register_post_accumulate_grad_hook(
                lambda p: autograd_grad_sample._create_or_extend_private_grad(p, p.grad)
            )
'''
GHOST = """
from . import transformers_support


class PrivacyEngine:
    def __init__(self, module, *, clipping_mode, skip_checks, record_snr, noise_multiplier, **options):
        transformers_support.forward_swapper(module)
        assert clipping_mode == "ghost" and skip_checks and not record_snr
        self.parameters = list(module.parameters())

    def attach(self, optimizer):
        optimizer.privacy_engine = self

    def _ghost_virtual_step(self, losses):
        losses.sum().backward()
        for parameter in self.parameters:
            parameter.summed_grad = parameter.grad

    def _create_noisy_clipped_gradient(self):
        for parameter in self.parameters:
            parameter.grad = parameter.summed_grad + 1

    def unlock(self):
        pass

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None
"""
FAILS = "def forward_swapper(module):\n    raise ValueError('of an older transformers')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkouts of both, and processes that know of them."""
    for checkout, package, text in (
        ("fast-differential-privacy", "fastDP", HOOKS.format(skipped=0)),
        ("private-transformers", "private_transformers", GHOST),
    ):
        place = tmp_path / checkout / package
        place.mkdir(parents=True)
        (place / "__init__.py").write_text(text)
        (place / "autograd_grad_sample.py").touch()
        (place / "transformers_support.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    for name in [name for name in sys.modules if name.partition(".")[0] in research_peers.PACKAGES.values()]:
        monkeypatch.delitem(sys.modules, name)
    for checkout in tmp_path.iterdir():
        monkeypatch.syspath_prepend(str(checkout))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in research_peers.PACKAGES.values()]:
        del sys.modules[name]


@pytest.mark.parametrize("method", ["fastdp_layer", "fastdp_flat", "private_transformers"])
def test_a_step_leaves_their_sums_and_noise_comes_apart(folder: Path, method: str, capsys) -> None:
    plain, theirs = build("mlp", tiny=True), build("mlp", tiny=True)
    make("none", plain).step()
    peer = make(method, theirs)
    for _ in range(2):
        peer.step()
        for ours, parameter in zip(plain.trainable, theirs.trainable, strict=True):
            torch.testing.assert_close(parameter.grad, ours.grad)
    peer.noise()
    assert all(not p.grad.equal(q.grad) for p, q in zip(plain.trainable, theirs.trainable, strict=True))
    peer.clear()
    assert all(parameter.grad is None for parameter in theirs.trainable)
    assert not capsys.readouterr().out  # where a worker's answers go


def test_a_parameter_that_gets_no_gradient_is_told(folder: Path) -> None:
    (folder / "fast-differential-privacy" / "fastDP" / "__init__.py").write_text(HOOKS.format(skipped=1))
    with pytest.raises(RuntimeError, match=r"leaves 1 of 6 tensors without a gradient, 0\.weight first"):
        make("fastdp_flat", build("mlp", tiny=True)).step()


def test_without_a_folder_they_are_not_asked_for_or_told_where_to_be() -> None:
    assert not [name for name in Options().methods if research_peers.package_of(name)]
    with pytest.raises(UserError, match=r"private_transformers cannot be imported .*: give peers=FOLDER"):
        make("private_transformers", build("mlp", tiny=True))


def test_a_folder_without_them_is_refused(tmp_path: Path, capsys) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main([f"peers={folder}"]) == 2
        assert "has no subfolder with fastDP or private_transformers in it: clone" in capsys.readouterr().err
