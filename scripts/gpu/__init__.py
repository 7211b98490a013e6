"""Builds and uses the kit for a GPU machine without network access."""
