"""From result rows to tables: reads `results/` only, never trains."""
