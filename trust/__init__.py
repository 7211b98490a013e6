"""Tests of the project's promises: each command tests one, prints a table and writes results/trust/<name>.csv."""
