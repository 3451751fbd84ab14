"""The supervisor: what runs beside the ranks inside a Slurm job, watches them, and ends those that cannot go on."""
