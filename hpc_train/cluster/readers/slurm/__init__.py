"""Readers of Slurm's topology: configuration files, scontrol, and the environment of a job."""
