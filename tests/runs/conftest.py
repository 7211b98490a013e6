"""The check before training is run once for each model and clipping mode."""

from tests.checked import verified_once  # noqa: F401
