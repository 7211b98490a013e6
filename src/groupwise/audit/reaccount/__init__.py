"""Repeats the accounting of a finished run from its own files: `python -m groupwise.audit.reaccount RUN`."""
