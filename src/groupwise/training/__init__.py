"""The private step, the training loop around it, and the files of a run."""
