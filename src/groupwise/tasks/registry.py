"""Makes a task by its name, or by the function of the user's own that `own_task._target_` names."""

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
    """The `Task` that ``function(config, device, **options)`` returns, `options` being the rest of `own_task`.

    The module is looked for where Python looks, and then in the folder in which the command is given. What the function
    raises is passed on as it is.

    Raises:
        UserError: it cannot be imported or called with these options, or returns no whole `Task`.
    """
    options = {str(key): value for key, value in config.own_task.items() if key != "_target_"}
    target = str(config.own_task["_target_"])
    function = _imported(target)
    try:
        inspect.signature(function).bind(config, device, **options)
    except TypeError as error:
        given = ", ".join(["config", "device", *options])
        raise UserError(
            f"own_task._target_={target} does not take ({given}) ({reason(error)}): give own_task the options that "
            "the function has after the two."
        ) from error
    except ValueError:  # a function that tells no signature
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
        raise UserError(f"own_task._target_={target} names no function: give module.function, such as mine.make_task.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # whatever the user's module does as it is imported
        where = f", line {error.lineno} of {error.filename}" if isinstance(error, SyntaxError) else ""
        raise UserError(
            f"own_task._target_={target} cannot be imported ({type(error).__name__}: {reason(error)}{where}): mend the "
            "module, or put its folder on PYTHONPATH or give the command in it."
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
    """What keeps it from being a task that can be trained; empty for a whole one."""
    if not isinstance(task, Task):
        return "that is no Task"
    if not isinstance(getattr(task, "model", None), nn.Module):
        return "without a model"
    size = getattr(task, "train_size", None)
    return "" if isinstance(size, int) and size > 0 else f"of {size} training examples (train_size)"


TASKS = {
    "cifar": "image_classification",
    **dict.fromkeys(("sst2", "qnli", "qqp", "mnli"), "text_classification"),
    **dict.fromkeys(("e2e", "dart", "samsum"), "text_generation"),
    **dict.fromkeys(("pretrain_masked", "pretrain_causal"), "pretraining"),
}
"""Name -> the module of this package whose function `make_<module>` makes it: imported only for its own tasks."""


def make_task(config: RunConfig, device: torch.device) -> Task:
    """Load the data and build the model of `config.task` on `device`; initial weights depend on `config.seed` alone.

    Raises:
        UserError: an unknown task; missing or broken data; a function of the user's own that makes none.
    """
    own = bool(config.own_task)
    if own and config.task in TASKS:
        raise UserError(f"task={config.task} is the package's: say another name beside own_task, such as task: mine.")
    if not own and config.task not in TASKS:
        told = ", ".join(TASKS)
        raise UserError(f"task={config.task} is not known: choose one of {told}, or say own_task._target_ in its file.")
    torch.manual_seed(config.seed)
    if own:
        return make_own_task(config, device)
    kind = TASKS[config.task]
    return getattr(importlib.import_module(f"groupwise.tasks.{kind}"), f"make_{kind}")(config, device)
