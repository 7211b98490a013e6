"""Goes from the command line to runs, and answers `--help`."""
