"""A finished run's record, checked again from its own files: `python -m groupwise.launch.verify RUN`."""
