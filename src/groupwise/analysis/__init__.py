"""Goes from result rows to tables and figures: reads `results/` only, never trains."""
