"""Disturbs what is around a command line: environment variables, folders in the way, results that are no results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trust.bad_input.attempt import Attempt

RUN = ("scale=smoke", "privacy=noiseless", "task=cifar", "clip=flat", "train.steps=1", "train.device=cpu")
VARIABLES: tuple[dict[str, str], ...] = (
    {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    {"RANK": "0", "WORLD_SIZE": "-1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""},
    {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "x"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "x", "SLURM_STEP_ID": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "y", "SLURM_STEP_NODELIST": "[[["},
    {"GROUPWISE_DATA": ""},
    {"GROUPWISE_DATA": "/nowhere"},
    {"GROUPWISE_DATA": "${seed}"},
    {"GROUPWISE_DATA": "a=b,[c]"},
    {"GROUPWISE_CACHE": "/dev/null/x"},
    {"GROUPWISE_CACHE": ""},
    {"HOME": "/nowhere"},
    {"HOME": ""},
    {"PATH": "/nowhere"},
    {"COLUMNS": "x"},
    {"COLUMNS": "-1"},
    {"TZ": "nowhere"},
    {"LANG": "nowhere", "LC_ALL": "nowhere"},
    {"CUDA_VISIBLE_DEVICES": "x"},
    {"GIT_DIR": "/nowhere"},
)


def _file(name: str, content: str = "in the way") -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return prepare


def _link(name: str, target: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return prepare


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "results")


FOLDERS: tuple[tuple[Callable[[Path], None], tuple[str, ...]], ...] = (
    (_file("results"), ()),
    (_file("results/runs"), ()),
    (_link("results", "results"), ()),
    (_link("results", "/nowhere/at/all"), ()),
    (_link("results/runs", "/dev/null"), ()),
    (_pipe, ()),
    (_file("out"), ("paths.results=out",)),
    (_file("out"), ("paths.results=out/deeper",)),
    (_file("out"), ("task=e2e", "export=out", "eval.generate.limit=0")),
    (_file("out"), ("task=e2e", "export=out/deeper", "eval.generate.limit=0")),
    (_link("out", "out"), ("task=e2e", "export=out", "eval.generate.limit=0")),
    (_file("data/cifar10.npz"), ("data.name=cifar10",)),
    (_file("data"), ("data.name=cifar10",)),
    (_link("data", "data"), ("data.name=cifar10",)),
    (_file("resumed/config.yaml", "seed: 1\n"), ("resume=resumed",)),
    (_file("resumed/other"), ("resume=resumed",)),
    (_file("resumed"), ("resume=resumed",)),
    (_file("w/model.pt"), ("model.weights=w",)),
    (_file("w/other"), ("model.weights=w",)),
)


def surrounding_attempts() -> Iterator[Attempt]:
    """Each of the above once, all trained."""
    for variables in VARIABLES:
        yield Attempt("environment", RUN, environment=variables, trains=True)
    for prepare, given in FOLDERS:
        yield Attempt("folder in the way", (*RUN, *given), prepare, trains=True)


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}
"""Audit events whose first arguments are paths that are changed."""
TWO_PATHS = {"os.rename", "os.link", "os.symlink"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname"}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
MAY_START = {"git", "uname"}
"""The record asks for the commit and the machine."""


def watch(allowed: Sequence[Path], report: Path) -> None:
    """From now on, for the life of this process: note in `report` every change of a file outside of `allowed`, every
    program started but git, and refuse every connection with an `OSError`.

    An audit hook of Python: code of C libraries that opens files by itself (torch's zip writer) is not seen.
    """
    homes = tuple(f"{path.resolve()}{os.sep}" for path in allowed)
    note = os.open(report, os.O_WRONLY | os.O_APPEND)

    def inside(path: Any, itself: bool) -> bool:
        if isinstance(path, int) or path is None:
            return True
        name = os.fsdecode(path)
        real = (
            os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
            if itself
            else os.path.realpath(name)
        )
        return f"{real}{os.sep}".startswith(homes) or real.startswith(("/dev/null", "/dev/shm/"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in NETWORK:
            if event == "socket.connect" and isinstance(args[1], str | bytes):
                return  # a socket of this machine's own
            raise OSError(f"the network is cut here ({event})")
        changed: Sequence[Any] = ()
        if event == "open":
            _, mode, flags = args
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & WRITING):
                changed = args[:1]
        elif event in CHANGES:
            changed = args[: 2 if event in TWO_PATHS else 1]
        elif event in PROGRAMS:
            program = args[0] if event != "subprocess.Popen" else args[1][0]
            if Path(os.fsdecode(program)).name not in MAY_START:
                os.write(note, f"{event} {args!r}\n".encode(errors="replace"))
        for path in changed:
            if not inside(path, event != "open"):
                os.write(note, f"{event} {os.fsdecode(path)}\n".encode(errors="replace"))

    sys.addaudithook(hook)
