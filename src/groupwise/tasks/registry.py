"""Makes a task by its name, or by the user's function that `own_task._target_` names."""

import importlib
import os
import sys

import torch

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError, reason
from groupwise.training.task import Task


def make_own_task(config: RunConfig, device: torch.device) -> Task:
    """The `Task` that ``function(config, device, **options)`` returns, where `options` is the rest of `own_task`.

    The module is looked for on Python's path, then in the working folder. Exceptions of the function pass through.

    Raises:
        UserError: it cannot be imported, or does not return a `Task`.
    """
    options = {str(key): value for key, value in config.own_task.items() if key != "_target_"}
    target = str(config.own_task["_target_"])
    module, _, name = target.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module may raise anything on import
        raise UserError(
            f"own_task._target_={target} cannot be imported ({type(error).__name__}: {reason(error)}): give "
            "module.function, and put the module's folder on PYTHONPATH or run the command there."
        ) from error
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
"""Name -> the module of this package whose function `make_<module>` makes it: imported only for its own tasks."""


def make_task(config: RunConfig, device: torch.device) -> Task:
    """Load the data and build the model of `config.task` on `device`; initial weights depend on `config.seed` alone.

    Raises:
        UserError: an unknown task; missing or broken data; a user's function that does not return a task.
    """
    own = bool(config.own_task)
    if own and config.task in TASKS:
        raise UserError(f"task={config.task} is a task of this package: give yours another name, such as task: mine.")
    if not own and config.task not in TASKS:
        known = ", ".join(TASKS)
        raise UserError(f"task={config.task} is unknown: choose one of {known}, or set own_task._target_ in its file.")
    torch.manual_seed(config.seed)
    if own:
        return make_own_task(config, device)
    kind = TASKS[config.task]
    return getattr(importlib.import_module(f"groupwise.tasks.{kind}"), f"make_{kind}")(config, device)
