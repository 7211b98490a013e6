"""Runs fastDP and private-transformers as their READMEs do. Neither is on a package index.

They are imported only for a method that needs them: from an installation, or from a subfolder of `peers=FOLDER`. That
folder holds checkouts of awslabs/fast-differential-privacy and lxuechen/private-transformers, and the packages that the
latter imports (install them with
``pip install --no-deps --target FOLDER/site ml-swissknife opt_einsum``).

- fastDP, book-keeping: `clipping_style` "layer-wise" and "all-layer", `clipping_fn="Abadi"` (the others do not clip as
  ours do), `clipping_mode="MixOpt"`. `origin_params` is set, which saves the plain gradients of all other parameters.
- private-transformers: `clipping_mode="ghost"`, two backward passes.

Options that save work are set. Noise, which fastDP adds during the backward pass, is timed separately. Both libraries
replace forward passes of an older transformers to give position ids a batch axis. Here they already have one, so this
is left out. Both may leave a parameter without a gradient and give no warning; here that is an error.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import Workload
from groupwise.errors import UserError
from groupwise.torchvision_import import import_torchvision_first

PACKAGES = {"fastdp": "fastDP", "private_transformers": "private_transformers"}
"""The prefix of the names of methods, and the package that they import."""
SAMPLES = 1 << 20
"""The size of the data set, which only the accounting uses."""


def package_of(method: str) -> str | None:
    """The package that a method imports, or None if it is not one of `PACKAGES`."""
    return next((package for name, package in PACKAGES.items() if method.startswith(name)), None)


def put_on_path(folder: str) -> None:
    """Put the subfolders of `peers=FOLDER` on the import path of this process and of the ones that it starts."""
    places = sorted(place for place in Path(folder).expanduser().resolve().glob("*") if place.is_dir())
    before = os.environ.get("PYTHONPATH")
    sys.path.extend(map(str, places))
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [before]), *map(str, places)])


def version_of(method: str) -> str | None:
    """The package behind a method and the last commit of its folder; None for other methods."""
    package = package_of(method)
    if package is None:
        return None
    place = Path(str(load(package).__file__)).parent
    git = ["git", "-C", str(place), "log", "-1", "--format=%h", "--", "."]  # nothing for a folder in .venv
    return f"{package} {subprocess.run(git, capture_output=True, text=True).stdout.strip() or 'installed'}"


def _budget(workload: Workload, threshold: float, noise_multiplier: float) -> dict[str, Any]:
    """The arguments that both engines take."""
    sizes = {"batch_size": workload.batch, "sample_size": SAMPLES, "epochs": 1}
    return {**sizes, "noise_multiplier": noise_multiplier, "max_grad_norm": threshold}


class FastDP:
    """Clipped sums in `p.private_grad`, computed by hooks during the backward pass."""

    def __init__(self, workload: Workload, threshold: float, noise_multiplier: float, style: str) -> None:
        fastdp: Any = load("fastDP")
        names = {id(p): name for name, p in workload.model.named_parameters()}
        self._workload, self._trainable = workload, workload.trainable
        self._names = [names[id(p)] for p in self._trainable]
        first = [name for name in self._names if "wte" in name or "wpe" in name or "_embeddings" in name]
        fastdp.autograd_grad_sample._create_or_extend_private_grad = _keep
        with redirect_stdout(sys.stderr):
            fastdp.PrivacyEngine(
                workload.model,
                **_budget(workload, threshold, noise_multiplier),
                clipping_fn="Abadi",
                clipping_style=style,
                loss_reduction="sum",
                origin_params=first or self._names[:1],
            )

    def step(self) -> None:
        """Run one backward pass."""
        self.clear()
        self._workload.loss().sum().backward()
        left = [name for name, p in zip(self._names, self._trainable, strict=True) if not hasattr(p, "private_grad")]
        if left:
            raise RuntimeError(f"leaves {len(left)} of {len(self._names)} tensors without a gradient, {left[0]} first")
        for parameter in self._trainable:
            parameter.grad = parameter.__dict__.pop("private_grad")

    def noise(self) -> None:
        """Add noise as fastDP does, one tensor at a time."""
        for parameter in self._trainable:
            assert parameter.grad is not None
            std: float = parameter.noise  # type: ignore[attr-defined]
            parameter.grad += torch.normal(0, std, size=parameter.size(), device=parameter.device)

    def clear(self) -> None:
        """Clear the sums."""
        for parameter in self._trainable:
            parameter.grad = None


class PrivateTransformers:
    """Computes norms in a first backward pass, clipped sums in a second."""

    def __init__(self, workload: Workload, threshold: float, noise_multiplier: float) -> None:
        library: Any = load("private_transformers")
        self._workload, self._trainable = workload, workload.trainable
        self._engine = library.PrivacyEngine(
            workload.model,
            **_budget(workload, threshold, noise_multiplier),
            clipping_mode="ghost",
            record_snr=False,
            skip_checks=True,
        )
        self._engine.attach(torch.optim.SGD(self._trainable, lr=0.0))

    def step(self) -> None:
        """Run both backward passes."""
        self.clear()
        self._engine._ghost_virtual_step(self._workload.loss())
        for parameter in self._trainable:
            parameter.grad = parameter.summed_grad  # type: ignore[attr-defined]

    def noise(self) -> None:
        """Add its noise and divide by B."""
        self._engine._create_noisy_clipped_gradient()
        self._engine.unlock()

    def clear(self) -> None:
        """Clear sums and norms."""
        self._engine.zero_grad()


def _keep(parameter: Any, clipped_sum: torch.Tensor, accumulate_private_grad: bool = True) -> None:
    """Accumulate a clipped sum as fastDP does, but without noise."""
    if hasattr(parameter, "private_grad"):
        parameter.private_grad += clipped_sum.detach()
    else:
        parameter.private_grad = clipped_sum.detach()


def load(package: str) -> Any:
    """Import fastDP or private-transformers, without its patches of the forward passes of transformers.

    Raises:
        UserError: the package is not installed and not in a folder that `put_on_path` was given.
    """
    import_torchvision_first()
    try:
        library = importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{package} cannot be imported ({error}): give peers=FOLDER, with a checkout in it.") from None
    importlib.import_module(f"{package}.transformers_support").forward_swapper = lambda module: None  # type: ignore[attr-defined]
    return library
