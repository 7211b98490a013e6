"""Attacks the releases of training runs to bound ε from below, and recomputes the accounting of finished runs."""

from groupwise.audit.bounds import one_run_epsilon, two_worlds_epsilon

__all__ = ["one_run_epsilon", "two_worlds_epsilon"]
