"""Types, composes and checks the configuration of a run, and hashes what names it."""
