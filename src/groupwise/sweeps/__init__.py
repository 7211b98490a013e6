"""Runs the cells of a table or figure, here or on a cluster, and gathers their rows."""
