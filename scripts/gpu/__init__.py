"""Makes and uses the kit for a GPU machine without a network."""
