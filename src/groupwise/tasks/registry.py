"""Lists task names and makes each from a configuration."""

from collections.abc import Callable

import torch

from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.tasks.own import make_own_task
from groupwise.training.task import Task

Maker = Callable[[RunConfig, torch.device], Task]


def _images(config: RunConfig, device: torch.device) -> Task:
    from groupwise.tasks.image_classification import make_image_classification

    return make_image_classification(config, device)


def _classification(config: RunConfig, device: torch.device) -> Task:
    from groupwise.tasks.text_classification import make_text_classification

    return make_text_classification(config, device)


def _generation(config: RunConfig, device: torch.device) -> Task:
    from groupwise.tasks.text_generation import make_text_generation

    return make_text_generation(config, device)


def _pretraining(config: RunConfig, device: torch.device) -> Task:
    from groupwise.tasks.pretraining import make_pretraining

    return make_pretraining(config, device)


TASKS: dict[str, Maker] = {
    "cifar": _images,
    **dict.fromkeys(("sst2", "qnli", "qqp", "mnli"), _classification),
    **dict.fromkeys(("e2e", "dart", "samsum"), _generation),
    **dict.fromkeys(("pretrain_masked", "pretrain_causal"), _pretraining),
}


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
    return make_own_task(config, device) if own else TASKS[config.task](config, device)
