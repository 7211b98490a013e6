"""Tasks: data, model, loss and metrics under one name."""

from groupwise.tasks.registry import TASKS, make_task

__all__ = ["TASKS", "make_task"]
