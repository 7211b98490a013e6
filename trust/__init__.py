"""Evidence for what the project promises: each command tries it, prints a table and writes results/trust/<name>.csv."""
