"""Trains models whose tensors are cut over several processes (tensor parallelism)."""
