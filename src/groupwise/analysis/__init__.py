"""Makes tables and figures from result rows. It reads `results/` and never trains."""
