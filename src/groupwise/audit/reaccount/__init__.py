"""Accounts for a finished run again, from its own files: `python -m groupwise.audit.reaccount RUN`."""
