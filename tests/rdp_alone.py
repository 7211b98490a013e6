"""Has runs account by RDP alone: their records hold the PRV accountant's figure too, which takes seconds to find."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from groupwise.privacy import accounting
from tests.few_orders import few_orders


@contextmanager
def rdp_alone(cache: Path) -> Iterator[None]:
    """With few orders and an empty cache; for tests of runs that ask for `privacy.accountant=rdp`, and not of ε."""
    with few_orders(cache), pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "epsilon_prv", lambda *mechanism: accounting.epsilon_bounds(*mechanism, "rdp"))
        yield
