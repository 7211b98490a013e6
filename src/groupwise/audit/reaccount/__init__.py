"""A finished run's record, checked again from its own files: `python -m groupwise.audit.reaccount RUN`."""
