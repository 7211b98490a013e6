"""Disturbs runs by the faults of clusters and disks."""
