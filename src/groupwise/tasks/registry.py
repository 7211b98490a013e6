"""Task names and how each is made from a configuration."""

from collections.abc import Callable

import torch

from groupwise.config import RunConfig
from groupwise.errors import UserError
from groupwise.training.task import Task


def _cifar(config: RunConfig, device: torch.device) -> Task:
    from groupwise.tasks.image_classification import make_image_classification

    return make_image_classification(config, device)


TASKS: dict[str, Callable[[RunConfig, torch.device], Task]] = {"cifar": _cifar}


def make_task(config: RunConfig, device: torch.device) -> Task:
    """Load the data and build the model of `config.task` on `device`; initial weights depend on `config.seed` alone.

    Raises:
        UserError: an unknown task; missing or broken data.
    """
    if config.task not in TASKS:
        raise UserError(f"task={config.task} is not known: choose one of {', '.join(TASKS)}.")
    torch.manual_seed(config.seed)
    return TASKS[config.task](config, device)
