"""Makes tables and figures from result rows: it reads `results/` only, and never trains."""
