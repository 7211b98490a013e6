"""The bugs that `python -m trust.planted` plants, the worst case of each, and the tiny model that shows it."""
