"""Trains a model in stages, one process and one device each, that clip what they host (per-device, Algorithm 2)."""
