"""Disturbs runs in every way that a cluster and a disk know."""
