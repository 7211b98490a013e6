"""The loop, and what a run leaves behind."""
