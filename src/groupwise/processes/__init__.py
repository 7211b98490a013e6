"""Starts the processes of a run, watches over them, and ends all of them when one has failed."""
