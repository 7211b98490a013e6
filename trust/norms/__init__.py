"""Measures how far each formula of a per-example norm is from the truth on large layers."""
