"""Runs a private step on an emulated GPU that computes nothing and counts operations and bytes."""
