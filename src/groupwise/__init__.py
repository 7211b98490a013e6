"""Differentially private deep learning with group-wise clipping."""

__version__ = "0.1.0"
