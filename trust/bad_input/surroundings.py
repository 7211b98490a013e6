"""Disturbs what is around a command line: environment variables, folders in the way, results that are no results."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

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
