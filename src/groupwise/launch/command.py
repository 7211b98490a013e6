"""From the command line to runs: compose, check, run, and tell mistakes from bugs."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from groupwise.config import RunConfig
from groupwise.errors import ProcessFailed, UserError
from groupwise.launch.compose import register, to_run_config
from groupwise.launch.keys import groups
from groupwise.launch.mistakes import COMPOSITION_ERRORS, in_one_sentence
from groupwise.launch.sweep import check_sweep

MISTAKE, BUG, INTERRUPTED = 2, 1, 130


def launch(conf: Path, train: Callable[[RunConfig], Any]) -> int:
    """Run what the command line asks for and return the exit code: 0, 1 a bug, 2 a mistake, 130 interrupted.

    One run, or with ``-m`` every cell of a sweep, where a failing cell does not stop the others. A mistake is
    one line on stderr with nothing written; a bug keeps its traceback.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, rather than print a report of its own and leave
    failures: list[tuple[str, Exception]] = []

    def cell(composed: DictConfig) -> None:
        try:
            train(to_run_config(composed))
        except Exception as error:
            failures.append((_overrides(), error))
            if many:
                _report(error)
                raise  # so that Hydra, or the cluster's job, knows that it failed

    try:
        register()
        arguments = _parse(sys.argv[1:])
        many = bool(arguments.multirun)
        total = check_sweep(arguments.overrides, conf) if many else 1
        hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name="config")(cell)()
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not failures:
            if not _is_mistake(error):
                raise
            print(f"error: {in_one_sentence(error, tuple(groups(conf)))}", file=sys.stderr)
            return MISTAKE
    if failures and many:
        print(f"{len(failures)} of {total or 'the'} cells failed:", file=sys.stderr)
        for overrides, failure in failures:
            print(f"  {overrides}: {type(failure).__name__}", file=sys.stderr)
    elif failures:
        _report(failures[0][1])
    return _exit_code([failure for _, failure in failures])


def _is_mistake(error: Exception) -> bool:
    # Hydra 1.3 raises a bare ValueError for privacy=3 (an option is a name) and for flags at odds.
    bare = ("Config group override must be", "Only one of --run", "The --resolve flag")
    return isinstance(error, COMPOSITION_ERRORS) or str(error).startswith(bare)


def _overrides() -> str:
    # Unresolved: an override may hold an interpolation, and that may be what failed.
    return " ".join(OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))  # type: ignore[arg-type]


def _exit_code(errors: Sequence[Exception]) -> int:
    if not errors:
        return 0
    return MISTAKE if all(isinstance(error, UserError) for error in errors) else BUG


def _report(error: Exception) -> None:
    if isinstance(error, (UserError, ProcessFailed)):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _parse(arguments: Sequence[str]) -> Namespace:
    """Hydra's own flags, refused in one sentence rather than with a page of usage."""
    from hydra.main import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; `python run.py --help` shows what can be given.")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))
