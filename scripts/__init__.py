"""Maintenance commands of a checkout; training does not need them."""
