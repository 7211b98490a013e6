"""Runs a private step on an emulated GPU: there is none, nothing is computed, operations and bytes are counted."""
