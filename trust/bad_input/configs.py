"""Command lines with something wrong in them, or unusual: keys, types, ranges, text, paths, pairs, grammar, flags."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, get_args

from groupwise.config.checks import PLACES
from groupwise.config.keys import CHOICES, groups, key_types
from trust.bad_input.attempt import ROOT, Attempt
from trust.bad_input.values import (
    EMPTY,
    ENDS,
    FRAGMENTS,
    HUGE,
    INJECTIONS,
    NOT_NUMBERS,
    PATHS,
    SENSIBLE,
    TEXTS,
    UNUSUAL,
)

CLIPS = (
    "none", "flat", "ghost", "fixed_layer", "adaptive_layer", "fixed_block", "adaptive_block", "adaptive_flat",
    "per_device", "adaptive_device",
)  # fmt: skip
TASKS = ("cifar", "cifar", "cifar", "sst2", "qnli", "qqp", "mnli", "e2e", "dart", "samsum")
SLOW = (
    "train.compile",
    "pipeline",
    "parallel.ranks",
    "tracker",
    "-m",
    "train.steps=null",
    "train.epochs=1",
    "--multirun",
    "export",
    "paths.results",
)
"""Parts of command lines that are checked but not carried out here: compilers, processes, services, long runs."""
LONG = ("train.steps", "train.epochs", "model.depth", "model.width")
"""Keys whose huge values are fine, and never end."""
Maker = Callable[[random.Random], list[str]]


def config_attempts(seed: int, count: int) -> Iterator[Attempt]:
    """`count` command lines, as many of each kind as of the others; those at the smallest scale go on to train."""
    draw = random.Random(seed)
    for kind, make in KINDS.items():
        for _ in range(count // len(KINDS)):
            given = make(draw)
            trains = "scale=smoke" in given and not any(part in word for word in given for part in SLOW)
            trains = trains and not (kind in ("huge", "ends of ranges") and given[-1].startswith(LONG))
            yield Attempt(f"config: {kind}", given, trains=trains)


def base(draw: random.Random, smoke: bool = True) -> list[str]:
    """A command line that is fine: any task, clipping mode and scale (or the smallest)."""
    scale = "smoke" if smoke else draw.choice(("smoke", "mini", "demo", "paper"))
    clip = draw.choice(CLIPS)
    budget = [] if clip == "none" else [f"privacy.epsilon={draw.choice((1, 1, 3, 8))}"]  # small ones are accounted fast
    return [f"scale={scale}", f"task={draw.choice(TASKS)}", f"clip={clip}", *budget, "train.device=cpu"]


LEAVES = {key: kind for key, kind in key_types().items() if not hasattr(kind, "__dataclass_fields__")}
GROUPS = groups(ROOT / "conf")


def _of(kind: Any, *wanted: type) -> bool:
    return any(part in wanted for part in (get_args(kind) or (kind,)))


NUMBERS = [key for key, kind in LEAVES.items() if _of(kind, int, float) and not _of(kind, list)]
WORDS = [key for key, kind in LEAVES.items() if _of(kind, str) and key not in CHOICES]


def quoted(text: str) -> str:
    """Text as a value that Hydra's grammar takes as it is."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _misspelt(draw: random.Random) -> list[str]:
    key = draw.choice([*LEAVES, *GROUPS])
    at = draw.randrange(len(key))
    wrong = draw.choice(
        (key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key[:at] + "x" + key[at + 1 :], key.upper(),
         key.replace(".", "_"), key.rpartition(".")[2] + "_", f"{key}.{key}", f"hydra.{key}", key + "é")
    )  # fmt: skip
    return [*base(draw), f"{draw.choice(('', '+', '++', '~'))}{wrong}={draw.choice(('1', 'true', 'text', 'null'))}"]


def _wrong_type(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice(list(LEAVES))}={draw.choice(NOT_NUMBERS)}"]


def _out_of_range(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice(NUMBERS)}={draw.choice(UNUSUAL)}"]


def _huge(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice(NUMBERS)}={draw.choice(HUGE)}"]


BUDGET = ("privacy.epsilon", "privacy.delta", "privacy.noise_multiplier", "clip.quantile_budget", "train.sample_rate")
"""Keys that the search for the noise follows to the ends of its range."""


def _ends(draw: random.Random) -> list[str]:
    key = draw.choice((draw.choice(BUDGET), draw.choice(NUMBERS)))
    whole = ["privacy.epsilon=null"] if key == "privacy.noise_multiplier" else []
    whole += ["train.batch_size=null"] if key == "train.sample_rate" else []
    return [*base(draw), *whole, f"{key}={draw.choice(ENDS)}"]


def _empty(draw: random.Random) -> list[str]:
    key = draw.choice([*LEAVES, *GROUPS])
    return [*base(draw), draw.choice(EMPTY).replace("KEY", key)]


def _unicode(draw: random.Random) -> list[str]:
    text = draw.choice(TEXTS)
    if draw.random() < 0.2:
        return [*base(draw), text + draw.choice(("", "=1", "=x"))]
    value = quoted(text) if draw.random() < 0.7 else text
    return [*base(draw), f"{draw.choice([*WORDS, *WORDS, *LEAVES])}={value}"]


def _injection(draw: random.Random) -> list[str]:
    value = draw.choice(INJECTIONS)
    return [*base(draw), f"{draw.choice([*WORDS, *LEAVES, 'clip', 'task'])}={draw.choice((value, quoted(value)))}"]


def _path(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice([*PLACES, *PLACES, *GROUPS])}={quoted(draw.choice(PATHS))}"]


def _fragment(draw: random.Random) -> list[str]:
    given = base(draw)
    given.insert(draw.randrange(len(given) + 1), draw.choice(FRAGMENTS).replace("KEY", draw.choice([*LEAVES, *GROUPS])))
    return given


def _valid(draw: random.Random) -> str:
    """A key or group with a value of its own."""
    if draw.random() < 0.3:
        group = draw.choice([name for name in GROUPS if name not in ("scale", "sweep", "task")])
        return f"{group}={draw.choice(GROUPS[group])}"
    if draw.random() < 0.4:
        key = draw.choice(list(CHOICES))
        return f"{key}={draw.choice(CHOICES[key])}"
    key = draw.choice(list(SENSIBLE))
    return f"{key}={draw.choice(SENSIBLE[key])}"


def _pair(draw: random.Random) -> list[str]:
    return [*base(draw), *(_valid(draw) for _ in range(2))]


def _many(draw: random.Random) -> list[str]:
    return [*base(draw), *(_valid(draw) for _ in range(draw.randrange(3, 9)))]


def _other_scales(draw: random.Random) -> list[str]:
    return [*base(draw, smoke=False), *(_valid(draw) for _ in range(2))]


def _any_value(draw: random.Random) -> list[str]:
    """Keys and values that were never meant for each other."""
    values = [*NOT_NUMBERS, *UNUSUAL, *(value for some in SENSIBLE.values() for value in some)]
    return [*base(draw), *(f"{draw.choice(list(LEAVES))}={draw.choice(values)}" for _ in range(2))]


def _null(draw: random.Random) -> list[str]:
    optional = [key for key, kind in LEAVES.items() if _of(kind, NoneType)]
    key = draw.choice([*optional, *LEAVES, *(key.partition(".")[0] for key in LEAVES)])
    return [*base(draw), f"{key}=null", *([_valid(draw)] if draw.random() < 0.5 else [])]


KINDS: dict[str, Maker] = {
    "unknown key": _misspelt,
    "wrong type": _wrong_type,
    "out of range": _out_of_range,
    "huge": _huge,
    "ends of ranges": _ends,
    "null": _null,
    "empty": _empty,
    "unicode": _unicode,
    "injection": _injection,
    "path": _path,
    "grammar": _fragment,
    "random value": _any_value,
    "two valid keys": _pair,
    "many valid keys": _many,
    "other scales": _other_scales,
}
