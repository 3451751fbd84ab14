"""Runs as Slurm jobs: what is asked of sbatch, the batch script, the supervisor in a job, and Slurm's own commands."""
