"""Makes a task by its name: data, model, per-example losses and metrics."""

from groupwise.tasks.registry import TASKS, make_task

__all__ = ["TASKS", "make_task"]
