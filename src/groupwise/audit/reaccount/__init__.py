"""Accounts for a finished run anew, from its own files: `python -m groupwise.audit.reaccount RUN`."""
