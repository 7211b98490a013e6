"""Lets the tests import transformers beside a torchvision that was built for another torch."""

import groupwise.integrations  # noqa: F401
