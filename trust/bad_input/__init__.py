"""Runs `run.py` with broken and unusual command lines, data files, models and checkpoints."""
