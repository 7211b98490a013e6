"""Lower bounds on ε from what a mechanism released; `python -m groupwise.privacy.audit` audits a mode."""

from groupwise.privacy.audit.bounds import (
    one_run_epsilon,
    one_run_gaussian_epsilon,
    two_worlds_epsilon,
    two_worlds_gaussian_epsilon,
)

__all__ = ["one_run_epsilon", "one_run_gaussian_epsilon", "two_worlds_epsilon", "two_worlds_gaussian_epsilon"]
