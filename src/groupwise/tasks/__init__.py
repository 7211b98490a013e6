"""Tasks: data, model, loss and metrics under one name."""

from groupwise.tasks.base import Task
from groupwise.tasks.registry import TASKS, make_task

__all__ = ["TASKS", "Task", "make_task"]
