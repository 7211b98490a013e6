"""The bugs that `python -m trust.planted_bugs` plants, and the worst case that shows each of them."""
