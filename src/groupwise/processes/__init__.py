"""Starts the processes of a run, watches them, and stops all of them if one fails."""
