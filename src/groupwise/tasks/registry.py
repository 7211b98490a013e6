"""Makes a task by its name, or with the user's function `own_task._target_`."""

import importlib
import inspect
import os
import sys

import torch

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, reason
from groupwise.training.task import Task


def make_own_task(config: RunConfig, device: torch.device) -> Task:
    """The `Task` that ``function(config, device, **options)`` returns, where `options` is the rest of `own_task`.

    The module is searched on Python's path, then in the working folder. Exceptions of the function are not caught.

    Raises:
        UserError: the function cannot be imported, has no such option, or does not return a `Task`.
    """
    options = {str(key): value for key, value in config.own_task.items() if key != "_target_"}
    target = str(config.own_task["_target_"])
    module, _, name = target.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
        signature = inspect.signature(function)
    except Exception as error:  # the user's module may raise anything on import
        raise UserError(
            f"own_task._target_={target} cannot be imported ({type(error).__name__}: {reason(error)}): give "
            "module.function, and add the module's folder to PYTHONPATH or run the command in it."
        ) from error
    try:
        signature.bind(config, device, **options)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise UserError(f"own_task does not fit {target}({takes}): {reason(error)}.") from error
    task = function(config, device, **options)
    if not isinstance(task, Task):
        raise UserError(
            f"own_task._target_={target} returned a {type(task).__name__}: return a groupwise.training.task.Task."
        )
    return task


TASKS = {
    "cifar": "image_classification",
    **dict.fromkeys(("sst2", "qnli", "qqp", "mnli"), "text_classification"),
    **dict.fromkeys(("e2e", "dart", "samsum"), "text_generation"),
}
"""Name -> the module of this package with the function `make_<module>`; it is imported only when needed."""


def make_task(config: RunConfig, device: torch.device) -> Task:
    """Load the data and build the model of `config.task` on `device`; initial weights depend on `config.seed` alone.

    Raises:
        UserError: an unknown task; missing or broken data; a user's function that does not return a task.
    """
    own = bool(config.own_task)
    if own and config.task in TASKS:
        raise UserError(
            f"task={config.task} is a task of this package: give your own task another name, such as task: mine."
        )
    if not own and config.task not in TASKS:
        known = ", ".join(TASKS)
        raise UserError(f"task={config.task} is unknown: choose one of {known}, or set own_task._target_ in its file.")
    torch.manual_seed(config.seed)
    if own:
        return make_own_task(config, device)
    kind = TASKS[config.task]
    return getattr(importlib.import_module(f"groupwise.tasks.{kind}"), f"make_{kind}")(config, device)
