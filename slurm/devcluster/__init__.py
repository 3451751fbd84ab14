"""A real multi-node Slurm cluster on one Debian machine, for development and tests."""
