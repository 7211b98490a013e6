"""Measures complete private training of eight small models:  python -m benchmarks.small_models model=logistic,tabular

The result is processor time (on a GPU wall time) per step in milliseconds. Each method runs the training loop of its
own documentation: sampling, data loading, forward and backward pass, clipping, noise, optimiser.

Models: logistic, tabular, digits_cnn, mnist_cnn, cifar_cnn, lstm, transformer, resnet18.
Methods: none (a plain loop), adaptive_layer and flat (make_private), on a GPU with cuda_graph=True too (…_graph),
opacus_hooks, opacus_ghost, and with peers=FOLDER fastdp_flat, on shuffled batches (see `benchmarks.research_peers`).
"""

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import groupwise
from benchmarks.meters import timed
from benchmarks.options import command, device, names, option, out
from benchmarks.research_peers import load, put_on_path
from benchmarks.results import MACHINE, Table
from groupwise.errors import UserError

SHOWN = ("model", "method", "milliseconds", "ratio", "status")
TABLE = Table("small_models.csv", ("model", "method", "batch", *MACHINE), SHOWN)
SCRIPT = Path(__file__).with_name("small_models_jax.py")


@dataclass
class SmallModelOptions:
    """The options of the command line."""

    model: str = option("all", "all, or some of them, separated by commas")
    method: str = option("all", "all, or some of them, separated by commas; none is always measured")
    device: str = device("cpu")
    rounds: int = option(7, "timed rounds of each method")
    steps: int | None = option(None, "steps of a round; default: as many as take half a second")
    jax: str | None = option(None, "on a CPU, also run jax_privacy: a Python with jax, jax-privacy and optax")
    peers: str | None = option(None, "also run fastDP: a folder with a checkout of it")
    out: str = out("small_models.csv")


# -- the models --------------------------------------------------------------------------------------------------------


class LSTMClassifier(nn.Module):
    """Classifies texts by the last output of an LSTM: `nn.LSTM`, or Opacus's own."""

    def __init__(self, lstm: Callable[..., nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(1000, 32), lstm(32, 64, batch_first=True), nn.Linear(64, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, 2)."""
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


class Block(nn.Module):
    """A transformer block with layer norms before attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, width)."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class TinyTransformer(nn.Module):
    """Classifies texts by the mean of two blocks' outputs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, width), nn.Linear(width, 2)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, 2)."""
        return self.head(self.blocks(self.embed(tokens)).mean(1))


def _resnet18() -> nn.Module:
    from groupwise.torchvision_import import import_torchvision_first

    import_torchvision_first()
    from torchvision.models import resnet18

    return resnet18(num_classes=10, norm_layer=partial(nn.GroupNorm, 16))


def _cnn(*channels: int, size: int) -> nn.Module:
    """3 × 3 convolutions with average pooling after every second one, then a linear layer."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(channels)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), *([nn.AvgPool2d(2)] if number % 2 else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * size * size, 10))


def _mnist_cnn() -> nn.Module:
    """The network of Opacus's MNIST example."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()),
        *(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def _mlp(*widths: int) -> nn.Module:
    pairs = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])


@dataclass(frozen=True)
class SmallModel:
    """A model and its data: `size` examples of `classes` classes and of this `shape`; token ids if `tokens` is True."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    size: int = 10_000
    tokens: bool = False

    def data(self) -> TensorDataset:
        """Random examples and labels."""
        shape = (self.size, *self.shape)
        inputs = torch.randint(1000, shape) if self.tokens else torch.randn(shape)
        return TensorDataset(inputs, torch.randint(self.classes, (self.size,)))


MODELS = {
    "logistic": SmallModel(lambda: nn.Linear(32, 2), (32,), 2, 256),
    "tabular": SmallModel(lambda: _mlp(104, 64, 32, 2), (104,), 2, 256),
    "digits_cnn": SmallModel(lambda: _cnn(1, 16, 32, size=4), (1, 8, 8), 10, 256, 2_000),
    "mnist_cnn": SmallModel(_mnist_cnn, (1, 28, 28), 10, 64),
    "cifar_cnn": SmallModel(lambda: _cnn(3, 32, 32, 64, 64, size=8), (3, 32, 32), 10, 64, 2_000),
    "lstm": SmallModel(LSTMClassifier, (32,), 2, 64, tokens=True),
    "transformer": SmallModel(TinyTransformer, (32,), 2, 64, tokens=True),
    "resnet18": SmallModel(_resnet18, (3, 32, 32), 10, 16, 1_000),
}
# -- the loops ---------------------------------------------------------------------------------------------------------

Loop = Iterator[Any]
"""An iterator; each `next` takes one training step."""


def _again(loader: DataLoader[Any], model: nn.Module) -> Iterator[Any]:
    device = _device(model)
    while True:
        for batch in loader:
            yield [tensor.to(device) for tensor in batch]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def plain(model: nn.Module, data: TensorDataset, batch: int) -> Loop:
    """A plain PyTorch loop, without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in _again(DataLoader(data, batch_size=batch, shuffle=True), model):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        yield None


def ours(clip: str, model: nn.Module, data: TensorDataset, batch: int, graph: bool = False) -> Loop:
    """`make_private`, as in its README."""
    optimizer, device = torch.optim.SGD(model.parameters(), lr=0.01), _device(model)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = (tensor.to(device) for tensor in batch)
        return F.cross_entropy(model(inputs), labels, reduction="none")

    budget: dict[str, Any] = {"noise_multiplier": 1.0, "steps": 10**5, "delta": 1e-5}
    private = groupwise.make_private(
        model, optimizer, data, losses, batch_size=batch, clip=clip, cuda_graph=graph, **budget
    )
    return iter(private.steps())


def opacus(mode: str, model: nn.Module, data: TensorDataset, batch: int) -> Loop:
    """Opacus' `make_private`, as in its README and its tutorial on ghost clipping."""
    from opacus import PrivacyEngine

    if isinstance(model, LSTMClassifier):
        from opacus.layers import DPLSTM

        model = LSTMClassifier(DPLSTM).to(_device(model))
    for layer in model.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False  # refused by its hooks
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion: Any = nn.CrossEntropyLoss()
    budget: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": True}
    wrapped = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch),
        criterion=criterion,
        grad_sample_mode=mode,
        **budget,
    )
    module, optimizer, *more, loader = wrapped
    criterion = more[0] if more else criterion
    for inputs, labels in _again(loader, module):
        optimizer.zero_grad()
        criterion(module(inputs), labels).backward()
        optimizer.step()
        yield None


def fastdp(model: nn.Module, data: TensorDataset, batch: int) -> Loop:
    """fastDP's `PrivacyEngine`, as in its README, with the same clipping as ours."""
    library = load("fastDP")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    budget: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "epochs": 1, "sample_size": len(data)}
    how = {"clipping_fn": "Abadi", "clipping_mode": "MixOpt", "clipping_style": "all-layer"}
    with redirect_stdout(sys.stderr):
        library.PrivacyEngine(model, batch_size=batch, origin_params=None, **how, **budget).attach(optimizer)
    for inputs, labels in _again(DataLoader(data, batch_size=batch, shuffle=True, drop_last=True), model):
        F.cross_entropy(model(inputs), labels).backward()
        if left := [name for name, parameter in model.named_parameters() if not hasattr(parameter, "private_grad")]:
            raise RuntimeError(f"fastDP does not train {', '.join(left)}")
        optimizer.step()
        optimizer.zero_grad()
        yield None


METHODS: dict[str, Callable[[nn.Module, TensorDataset, int], Loop]] = {
    "none": plain,
    "adaptive_layer": partial(ours, "adaptive_layer"),
    "adaptive_layer_graph": partial(ours, "adaptive_layer", graph=True),
    "flat": partial(ours, "flat"),
    "flat_graph": partial(ours, "flat", graph=True),
    "opacus_hooks": partial(opacus, "hooks"),
    "opacus_ghost": partial(opacus, "ghost"),
    "fastdp_flat": fastdp,
}

# -- the clock ---------------------------------------------------------------------------------------------------------


def measure(name: str, methods: Sequence[str], options: SmallModelOptions) -> list[dict[str, Any]]:
    """Time the methods in turn; returns a row for each.

    Args:
        name: of `MODELS`. methods: of `METHODS`, `none` first.
    """
    kind, rounds, steps = MODELS[name], options.rounds, options.steps
    torch.manual_seed(0)
    model, data = kind.make().to(options.device), kind.data()
    loops, turn, rows = {}, {}, {}
    for method in methods:
        rows[method] = {
            "model": name,
            "method": method,
            "parameters": sum(p.numel() for p in model.parameters()),
            "batch": kind.batch,
            "device": options.device,
            "threads": torch.get_num_threads(),
            "dtype": "float32",
            "status": "ok",
        }
        try:
            loop = METHODS[method](copy.deepcopy(model), data, kind.batch)
            if method.endswith("_graph"):
                _time(loop, 60, options.device)  # record graphs for the usual batch sizes
            turn[method] = steps or max(3, round(0.5 / _time(loop, 5, options.device)))
        except Exception as error:  # a peer's refusal is a result
            if not method.startswith(("opacus", "fastdp")):
                raise
            rows[method]["status"] = str(error).partition(".")[0][:120]
        else:
            loops[method] = loop
    seconds: dict[str, list[float]] = {method: [] for method in loops}
    for _ in range(rounds):
        for method, loop in loops.items():
            seconds[method].append(_time(loop, turn[method], options.device))
    for method, times in seconds.items():
        rows[method] |= {
            "rounds": rounds,
            "steps": turn[method],
            "milliseconds": 1e3 * median(times),
            "ratio": median(none / own for none, own in zip(seconds["none"], times, strict=True)),
        }
    return [{"rounds": 0, "steps": 0, "milliseconds": None, "ratio": None, **row} for row in rows.values()]


def by_jax(python: str, plain: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The row of jax_privacy, measured by that Python on one thread and compared with the row `plain`."""
    one_thread = os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    command = [python, str(SCRIPT), f"model={plain['model']}", f"rounds={rounds}"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UserError(f"jax={python} failed: {lines[-1][:200]}") from None
    found = json.loads(done.stdout)
    row = {**plain, "method": "jax_privacy", **{name: found[name] for name in ("milliseconds", "rounds", "steps")}}
    return row | {"ratio": plain["milliseconds"] / found["milliseconds"], "peer": f"jax-privacy {found['version']}"}


def _time(loop: Loop, steps: int, device: str) -> float:
    """Processor seconds (on a GPU wall seconds) per step, after one untimed step."""
    next(loop)
    taken = timed(partial(next, loop), steps, device)
    return taken.wall if device == "cuda" else taken.cpu


def run(options: SmallModelOptions) -> None:
    """Measure, write the rows and print them."""
    known = [method for method in METHODS if options.device == "cuda" or not method.endswith("_graph")]
    if options.peers:
        put_on_path(options.peers)
    else:
        known.remove("fastdp_flat")
    models, methods = names("model", options.model, MODELS), names("method", options.method, known, first="none")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="opacus|torch")
    for name in models:
        rows = measure(name, methods, options)
        if options.jax and options.device == "cpu" and name != "resnet18":
            rows.append(by_jax(options.jax, rows[0], options.rounds))
        TABLE.add(options.out, rows)


main = command(SmallModelOptions, run)

if __name__ == "__main__":
    sys.exit(main())
