"""Makes the training of a model of one's own private, in one call; needs no Hydra."""

from groupwise.private.fix import fix_model
from groupwise.private.make import make_private
from groupwise.private.private import Private, Step

__all__ = ["Private", "Step", "fix_model", "make_private"]
