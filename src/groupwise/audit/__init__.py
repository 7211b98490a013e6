"""Audits: what an attacker learns of his own examples from what a run releases, against the ε that it claims."""
