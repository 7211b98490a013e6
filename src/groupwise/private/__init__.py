"""Makes the training of a model of one's own private, in one call; needs no Hydra."""

from groupwise.private.loop import Private
from groupwise.private.make import make_private

__all__ = ["Private", "make_private"]
