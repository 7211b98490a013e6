"""Attacks what a run releases, bounds the ε that this proves, and accounts for finished runs again."""

from groupwise.audit.bounds import (
    one_run_epsilon,
    one_run_gaussian_epsilon,
    two_worlds_epsilon,
    two_worlds_gaussian_epsilon,
)

__all__ = ["one_run_epsilon", "one_run_gaussian_epsilon", "two_worlds_epsilon", "two_worlds_gaussian_epsilon"]
