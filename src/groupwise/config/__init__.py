"""The configuration of a run: its schema, its composition by Hydra, its checks and its hash."""
