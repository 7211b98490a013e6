"""Makes one page with all results: tables, figures, findings, privacy and errata, in a file that needs nothing else."""
