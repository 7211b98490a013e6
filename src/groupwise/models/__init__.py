"""Builds the networks to train. Names of parameters are those of the original libraries."""
