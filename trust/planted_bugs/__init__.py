"""The bugs that `python -m trust.planted_bugs` plants, the worst case of each, and the tiny model that shows it."""
