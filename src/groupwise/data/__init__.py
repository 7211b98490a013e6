"""Loads data sets as tensors in memory."""
