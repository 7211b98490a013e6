"""Makes a task by its name, or by the user's function that `own_task._target_` names."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, did_you_mean, reason
from groupwise.training.task import Task


def make_own_task(config: RunConfig, device: torch.device) -> Task:
    """The `Task` that ``function(config, device, **options)`` returns, where `options` is the rest of `own_task`.

    The module is looked for on Python's path, then in the working folder. Exceptions of the function pass through.

    Raises:
        UserError: it cannot be imported or called with these options, or does not return a complete `Task`.
    """
    options = {str(key): value for key, value in config.own_task.items() if key != "_target_"}
    target = str(config.own_task["_target_"])
    function = _imported(target)
    try:
        inspect.signature(function).bind(config, device, **options)
    except TypeError as error:
        given = ", ".join(["config", "device", *options])
        raise UserError(
            f"own_task._target_={target} does not take ({given}) ({reason(error)}): give own_task the function's "
            "options after (config, device)."
        ) from error
    except ValueError:  # a function without a signature
        pass
    task = function(config, device, **options)
    if missing := _missing(task):
        raise UserError(
            f"own_task._target_={target} returned a {type(task).__name__} {missing}: return a "
            "groupwise.training.task.Task, its model an nn.Module and its train_size the number of training examples."
        )
    return task


def _imported(target: str) -> Callable[..., Any]:
    """The function `package.module.function`."""
    module_name, _, name = target.rpartition(".")
    if not all(part.isidentifier() for part in target.split(".")) or not module_name:
        raise UserError(f"own_task._target_={target} is not a function: give module.function, such as mine.make_task.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # the user's module may raise anything on import
        where = f", line {error.lineno} of {error.filename}" if isinstance(error, SyntaxError) else ""
        raise UserError(
            f"own_task._target_={target} cannot be imported ({type(error).__name__}: {reason(error)}{where}): fix the "
            "module, put its folder on PYTHONPATH, or give the command in that folder."
        ) from error
    function = getattr(module, name, None)
    if function is None:
        hint = did_you_mean(name, vars(module))
        raise UserError(f"own_task._target_={target}: the module {module_name} has no {name}{hint}.")
    if not callable(function):
        raise UserError(
            f"own_task._target_={target} is of type {type(function).__name__}: give a function of (config, device)."
        )
    return function


def _missing(task: object) -> str:
    """The reason why it is not a complete task; empty if it is one."""
    if not isinstance(task, Task):
        return "that is not a Task"
    if not isinstance(getattr(task, "model", None), nn.Module):
        return "without a model"
    size = getattr(task, "train_size", None)
    return "" if isinstance(size, int) and size > 0 else f"of {size} training examples (train_size)"


TASKS = {
    "cifar": "image_classification",
    **dict.fromkeys(("sst2", "qnli", "qqp", "mnli"), "text_classification"),
    **dict.fromkeys(("e2e", "dart", "samsum"), "text_generation"),
}
"""Name -> the module of this package whose function `make_<module>` makes it: imported only for its own tasks."""


def make_task(config: RunConfig, device: torch.device) -> Task:
    """Load the data and build the model of `config.task` on `device`; initial weights depend on `config.seed` alone.

    Raises:
        UserError: an unknown task; missing or broken data; a function of the user's that does not make a task.
    """
    own = bool(config.own_task)
    if own and config.task in TASKS:
        raise UserError(f"task={config.task} is a task of the package: give yours another name, such as task: mine.")
    if not own and config.task not in TASKS:
        known = ", ".join(TASKS)
        raise UserError(f"task={config.task} is unknown: choose one of {known}, or set own_task._target_ in its file.")
    torch.manual_seed(config.seed)
    if own:
        return make_own_task(config, device)
    kind = TASKS[config.task]
    return getattr(importlib.import_module(f"groupwise.tasks.{kind}"), f"make_{kind}")(config, device)
