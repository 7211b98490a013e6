"""Trains a model in pipeline stages, one per process and device. Each stage clips its own parameters (Algorithm 2)."""
