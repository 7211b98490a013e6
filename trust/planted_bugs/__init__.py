"""The bugs that `python -m trust.planted_bugs` plants, and a worst case that reveals each of them."""
