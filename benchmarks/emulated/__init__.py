"""Runs a private step on an emulated GPU: nothing is computed, but operations and bytes are counted."""
