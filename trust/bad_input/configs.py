"""Wrong or unusual command lines: keys, types, ranges, texts, paths, pairs of keys, grammar and flags."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml

from groupwise.config.keys import CHOICES, groups, key_types
from trust.bad_input.attempt import ROOT, Attempt

VALUES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text(encoding="utf-8"))
SENSIBLE: dict[str, list[str]] = VALUES["sensible"]
PLACES = (
    "paths.data", "paths.results", "resume", "export", "data.hub", "data.train_file",
    "model.source", "model.tokenizer", "model.weights",
)  # fmt: skip
LONG = ("x" * 300, "x" * 5000, "é" * 200, "a/" * 2000, "9" * 5000, "1" + "0" * 400)
CLIPS = (
    "none", "flat", "ghost", "fixed_layer", "adaptive_layer", "fixed_block", "adaptive_block", "adaptive_flat",
    "per_device", "adaptive_device",
)  # fmt: skip
TASKS = ("cifar", "cifar", "cifar", "sst2", "qnli", "qqp", "mnli", "e2e", "dart", "samsum")
SLOW = (
    "train.compile", "pipeline", "parallel.ranks", "tracker", "-m", "train.steps=null", "train.epochs=1", "--multirun",
    "export", "paths.results",
)  # fmt: skip
"""Command lines with these words are checked but not run: compilers, processes, services, long runs."""
ENDLESS = ("train.steps", "train.epochs", "model.depth", "model.width")
"""Keys whose huge values are valid, but make endless runs."""
BUDGET = ("privacy.epsilon", "privacy.delta", "privacy.noise_multiplier", "clip.quantile_budget", "train.sample_rate")
"""Keys that determine the noise multiplier, which must be found up to the ends of their ranges."""
LEAVES = {key: kind for key, kind in key_types().items() if not hasattr(kind, "__dataclass_fields__")}
GROUPS = groups(ROOT / "conf")
ALL = (*LEAVES, *GROUPS)


def _of(kind: Any, *wanted: type) -> bool:
    return any(part in wanted for part in (get_args(kind) or (kind,)))


NUMBERS = [key for key, kind in LEAVES.items() if _of(kind, int, float) and not _of(kind, list)]
SCALARS = [key for key, kind in LEAVES.items() if not _of(kind, list, dict) and get_origin(kind) not in (list, dict)]
WORDS = [key for key, kind in LEAVES.items() if _of(kind, str) and key not in CHOICES]
Maker = Callable[[random.Random], list[str]]


def config_attempts(seed: int, count: int) -> Iterator[Attempt]:
    """`count` command lines, equally many of each kind; those at the smallest scale are also run."""
    draw = random.Random(seed)
    for kind, make in KINDS.items():
        for _ in range(count // len(KINDS)):
            given = make(draw)
            trains = "scale=smoke" in given and not any(part in word for word in given for part in SLOW)
            trains = trains and not (kind in ("huge", "ends of ranges") and given[-1].startswith(ENDLESS))
            yield Attempt(f"config: {kind}", given, trains=trains)


def base(draw: random.Random, smoke: bool = True) -> list[str]:
    """A valid command line: any task, clipping mode and scale (or the smallest)."""
    scale = "smoke" if smoke else draw.choice(("smoke", "mini", "demo", "paper"))
    clip = draw.choice(CLIPS)
    budget = [] if clip == "none" else [f"privacy.epsilon={draw.choice((1, 1, 3, 8))}"]  # small ones are fast
    return [f"scale={scale}", f"task={draw.choice(TASKS)}", f"clip={clip}", *budget, "train.device=cpu"]


def quoted(text: str) -> str:
    """Text as a quoted value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def odd(keys: Sequence[str], values: Sequence[str], quotes: float, draw: random.Random) -> list[str]:
    """One key with an invalid or unusual value, which is quoted with this probability."""
    value = draw.choice(values)
    return [*base(draw), f"{draw.choice(keys)}={quoted(value) if draw.random() < quotes else value}"]


def ends(draw: random.Random) -> list[str]:
    """A number at the end of its range, without the keys that exclude it."""
    key = draw.choice((draw.choice(BUDGET), draw.choice(NUMBERS)))
    extra = ["privacy.epsilon=null"] if key == "privacy.noise_multiplier" else []
    extra += ["train.batch_size=null"] if key == "train.sample_rate" else []
    return [*base(draw), *extra, f"{key}={draw.choice(VALUES['ends of ranges'])}"]


def misspelt(draw: random.Random) -> list[str]:
    """A key that does not exist."""
    key = draw.choice(ALL)
    at = draw.randrange(len(key))
    wrong = draw.choice(
        (key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key[:at] + "x" + key[at + 1 :], key.upper(),
         key.replace(".", "_"), key.rpartition(".")[2] + "_", f"{key}.{key}", f"hydra.{key}", key + "é")
    )  # fmt: skip
    return [*base(draw), f"{draw.choice(('', '+', '++', '~'))}{wrong}={draw.choice(('1', 'true', 'text', 'null'))}"]


def phrase(kind: str, draw: random.Random) -> list[str]:
    """An entry of the list, with KEY replaced by a key, anywhere on a command line."""
    given = base(draw)
    given.insert(draw.randrange(len(given) + 1), draw.choice(VALUES[kind]).replace("KEY", draw.choice(ALL)))
    return given


def null(draw: random.Random) -> list[str]:
    """A key, optional or not, or a whole group, set to null."""
    optional = [key for key, kind in LEAVES.items() if _of(kind, NoneType)]
    key = draw.choice([*optional, *LEAVES, *(key.partition(".")[0] for key in LEAVES)])
    return [*base(draw), f"{key}=null", *([valid(draw)] if draw.random() < 0.5 else [])]


def valid(draw: random.Random) -> str:
    """A key or group with a valid value."""
    if draw.random() < 0.3:
        group = draw.choice([name for name in GROUPS if name not in ("scale", "sweep", "task")])
        return f"{group}={draw.choice(GROUPS[group])}"
    values = {**CHOICES} if draw.random() < 0.4 else SENSIBLE
    key = draw.choice(list(values))
    return f"{key}={draw.choice(values[key])}"


def several(least: int, most: int, smoke: bool, draw: random.Random) -> list[str]:
    """`least` to `most` keys with valid values."""
    return [*base(draw, smoke), *(valid(draw) for _ in range(draw.randint(least, most)))]


KINDS: dict[str, Maker] = {
    "unknown key": misspelt,
    "wrong type": partial(odd, tuple(LEAVES), VALUES["wrong type"], 0.0),
    "out of range": partial(odd, NUMBERS, VALUES["out of range"], 0.0),
    "huge": partial(odd, NUMBERS, (*VALUES["huge"], *LONG[4:]), 0.0),
    "ends of ranges": ends,
    "null": null,
    "empty": partial(phrase, "empty"),
    "unicode": partial(odd, (*WORDS, *WORDS, *LEAVES), (*VALUES["unicode"], *LONG[:3]), 0.7),
    "injection": partial(odd, (*WORDS, *SCALARS, "clip", "task"), VALUES["injection"], 0.5),
    "path": partial(odd, (*PLACES, *PLACES, *GROUPS), (*VALUES["path"], *LONG[:4]), 1.0),
    "grammar": partial(phrase, "grammar"),
    "two valid keys": partial(several, 2, 2, True),
    "many valid keys": partial(several, 3, 8, True),
    "other scales": partial(several, 2, 2, False),
}
