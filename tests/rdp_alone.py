"""Has runs account by RDP alone, at fewer orders: bounds that hold as well, in a small part of the time.

Their records hold the PRV accountant's figure too, which takes seconds to find.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from groupwise.privacy import accountants, accounting, calibration


@contextmanager
def rdp_alone() -> Iterator[None]:
    """For tests of runs that ask for `privacy.accountant=rdp`, and not of ε."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountants, "ORDERS", accountants.ORDERS[::9])
        patch.setattr(accounting, "epsilon_prv", lambda *mechanism: accounting.epsilon_bounds(*mechanism, "rdp"))
        forget()
        yield
    forget()


def forget() -> None:
    """Forget every ε and σ that was found."""
    accounting._composed.cache_clear()
    calibration._search.cache_clear()
