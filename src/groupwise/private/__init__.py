"""Makes the training of any PyTorch model private, in one call and without Hydra."""

from groupwise.private.fix import fix_model
from groupwise.private.make import make_private
from groupwise.private.private import Private, Step, detach

__all__ = ["Private", "Step", "detach", "fix_model", "make_private"]
