"""From the command line to a typed, validated run."""
