"""Tries broken and unusual command lines, data files, models and checkpoints, each as `run.py` would."""
