"""Has runs account by RDP alone, at fewer orders: bounds that hold as well, in a small part of the time.

Their records hold the PRV accountant's figure too, which takes seconds to find.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from groupwise.privacy import accountants, accounting


@contextmanager
def rdp_alone(cache: Path) -> Iterator[None]:
    """With an empty cache; for tests of runs that ask for `privacy.accountant=rdp`, and not of ε."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUPWISE_CACHE", str(cache))
        patch.setattr(accountants, "ORDERS", accountants.ORDERS[::9])
        patch.setattr(accounting, "epsilon_prv", lambda *mechanism: accounting.epsilon_bounds(*mechanism, "rdp"))
        accounting._composed.cache_clear()
        yield
    accounting._composed.cache_clear()
