"""Runs as Slurm jobs: what is asked of sbatch, the batch scripts, the watcher in the job, and Slurm's own commands."""
