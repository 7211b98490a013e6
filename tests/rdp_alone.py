"""Makes runs account by RDP alone, at fewer orders: the bounds are valid, and much faster to compute.

By default the record of a run also contains the PRV accountant's figure, which takes seconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from groupwise.privacy import accountants, accounting, calibration


@contextmanager
def rdp_alone() -> Iterator[None]:
    """For tests of runs with `privacy.accountant=rdp` that do not check ε itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountants, "ORDERS", accountants.ORDERS[::9])
        patch.setattr(accounting, "epsilon_prv", lambda *mechanism: accounting.epsilon_bounds(*mechanism, "rdp"))
        forget()
        yield
    forget()


def forget() -> None:
    """Clear the caches of ε and σ."""
    accounting._composed.cache_clear()
    calibration._search.cache_clear()
