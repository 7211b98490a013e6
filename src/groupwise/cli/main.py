"""The command line: composes and checks a configuration, runs it, and distinguishes a user's mistakes from bugs."""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.main import get_args_parser
from omegaconf import DictConfig, OmegaConf

from groupwise.config.checks import refuse_unused
from groupwise.config.compose import refuse_taken_names, register, to_run_config
from groupwise.config.keys import groups
from groupwise.config.schema import Command, RunConfig
from groupwise.config.sentences import COMPOSITION_ERRORS, in_one_sentence
from groupwise.errors import BUG, INTERRUPTED, MISTAKE, ProcessFailed, UserError, exit_code, report, tell_warnings
from groupwise.sweeps.folder import CELLS, begin_sweep, report_sweep, run_cell
from groupwise.sweeps.multirun import run_cells
from groupwise.sweeps.prepare import PlannedSweep, plan_sweep
from groupwise.sweeps.status import finished, lines_of, status

SHOWN = ("run", "info", "help", "hydra_help", "shell_completion")
"""Hydra's flags that run no cells, or that Hydra does not allow with ``-m``."""
Train = Callable[[RunConfig], Any]


def launch(conf: Path, train: Train) -> int:
    """Execute the command line and return the exit code: 0, 1 for a bug, 2 for a user's mistake, 130 if interrupted.

    It is one run, or with ``-m`` all unfinished cells of a sweep. A failing cell does not stop the others. A mistake is
    reported as one line on stderr, and nothing is written. A bug is reported with its traceback.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its exceptions instead of printing them and exiting
    failed: list[Exception] = []
    began: list[DictConfig] = []
    folder: Path | None = None

    def task(composed: DictConfig) -> Any:
        began.append(composed)
        if folder is not None:
            return run_cell(composed, train)
        try:
            return train(_single(composed))
        except Exception as error:
            failed.append(error)  # not raised, since Hydra would add its own text
            return None

    tell_warnings()
    try:
        register()
        given = _parse(sys.argv[1:])
        overrides: list[str] = given.overrides
        if given.config_dir is not None:
            refuse_taken_names(Path(given.config_dir), conf)
            overrides = [f"hydra.searchpath=['file://{Path(given.config_dir).resolve()}']", *overrides]
        main = hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name="config")(task)
        if (given.multirun or "hydra.mode=MULTIRUN" in given.overrides) and not any(vars(given)[key] for key in SHOWN):
            planned = plan_sweep(overrides, conf)
            folder = _begin(planned, only_list=bool(given.cfg))
            if folder is not None:
                _multirun(given.overrides, planned.hydra, folder, main)
        else:
            main()
    except SystemExit as end:  # Hydra has printed its help
        return MISTAKE if end.code == 1 else int(end.code or 0)
    except KeyboardInterrupt:
        print("interrupted: the same command without overwrite=true resumes from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe
        raise
    except Exception as error:
        code = 0 if folder is None else report_sweep(folder, error)
        listed = folder is not None and (folder / CELLS).is_file()
        if isinstance(error, ProcessFailed) or (code and listed and isinstance(error, UserError)):
            report(error)
            return code or BUG
        if code:
            return code
        if not _is_mistake(error, bool(began)):
            raise
        print(f"error: {in_one_sentence(error, tuple(groups(conf)))}", file=sys.stderr)
        if folder is not None:
            _remove(folder)
        return MISTAKE
    if folder is not None:
        if (folder / CELLS).is_file():  # only Hydra's basic sweeper knows its cells in advance
            print(*status(folder, each=True), sep="\n")
        return report_sweep(folder)
    for mistake in failed:
        report(mistake)
    return exit_code(type(mistake).__name__ for mistake in failed)


def _single(composed: DictConfig) -> RunConfig:
    """Return the configuration of one run. Raises `UserError` for settings of sweeps."""
    if composed.sweep != Command().sweep or HydraConfig.get().runtime.choices.get("sweep"):
        raise UserError("+sweep= chooses the cells of a sweep: add -m to run them.")
    for word in HydraConfig.get().overrides.hydra:
        if word.startswith(("hydra/launcher=", "hydra/sweeper=")):
            raise UserError(f"{word} is for sweeps: add -m; a single run is then a sweep of one cell.")
    config = to_run_config(composed)
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)  # as typed, ${...} included
    refuse_unused(typed, config)
    return config


def _begin(planned: PlannedSweep, only_list: bool) -> Path | None:
    """Create the folder of a sweep; return None if there is nothing to do. With ``--cfg`` only list the cells."""
    if only_list:
        if planned.cells is None:
            raise UserError("hydra/sweeper chooses the cells during the sweep, so there is no list: leave --cfg out.")
        print(*(f"{cell.run}{' (done)' * cell.done}  {cell.name}" for cell in planned.cells), sep="\n")
        print(f"cells: {len(planned.cells)}, done already: {sum(cell.done for cell in planned.cells)}")
        return None
    if planned.cells is not None:
        done = sum(cell.done for cell in planned.cells)
        if done:
            print(
                f"{done} of {len(planned.cells)} cells are done already (overwrite=true runs them again)",
                file=sys.stderr,
            )
        if done == len(planned.cells):
            print(*lines_of([finished(cell.name, cell.run) for cell in planned.cells]), sep="\n")
            return None
    return begin_sweep(planned)


def _multirun(overrides: Sequence[str], settings: DictConfig, folder: Path, main: Callable[[], None]) -> None:
    """Pass the cells in the folder to Hydra, or the unchanged command line to another sweeper."""
    program, flags = sys.argv[0], sys.argv[1 + len(overrides) :]
    where = f"hydra.sweep.dir='{folder}'"

    def multirun(words: Sequence[str]) -> None:
        sys.argv[:] = [program, *words, where, *flags]
        main()

    if not (folder / CELLS).is_file():
        multirun(overrides)
        return
    shared = [*settings.overrides.hydra, *settings.overrides.task]  # since their files may set Hydra's keys
    shared = [word for word in shared if not word.startswith("hydra.sweeper.params")]  # the cells are known
    run_cells(folder, settings, lambda words: multirun([*shared, "hydra.sweeper.params=null", *words]))


def _remove(folder: Path) -> None:
    """Remove the folder of a sweep of which no cell has run."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # keep parents that are not empty
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def _is_mistake(error: Exception, began: bool) -> bool:
    """Whether the user made a mistake. Before a run starts, this is every error inside Hydra, since Hydra raises other
    exceptions as well: privacy=3 is a ValueError, and a number of 400 digits an OverflowError."""
    modules = {frame.f_globals["__name__"].partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    return isinstance(error, COMPOSITION_ERRORS) or (not began and bool(modules & {"hydra", "omegaconf", "antlr4"}))


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}; `python run.py --help` lists the options.")


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse Hydra's flags, and move them behind the overrides, since Hydra does not accept overrides on both sides of a
    flag. Raises `UserError` instead of printing a usage page."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args(list(arguments))
    flags = list(arguments)
    for word in given.overrides:
        if word.startswith("~"):
            raise UserError(f"{word} would delete a setting, which every run needs: give a value, or leave it out.")
        flags.remove(word)
    sys.argv[1:] = [*given.overrides, *flags]
    return given
