"""Commands of a checkout that no run needs."""
