"""Makes tasks by name: data, model, loss and metrics."""

from groupwise.tasks.registry import TASKS, make_task

__all__ = ["TASKS", "make_task"]
