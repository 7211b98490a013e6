"""Common architectures, each clipped in every mode and compared with a loop over single examples."""
