"""Tests runs under the faults of clusters and disks."""
