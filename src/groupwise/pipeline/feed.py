"""What goes through a pipeline; it is made by tasks, which do not know pipelines, so it is defined with training."""

from groupwise.training.feed import Feed, Microbatch

__all__ = ["Feed", "Microbatch"]
