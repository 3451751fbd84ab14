"""Start ranks from a configuration: the job spec, the local pool, Slurm through submitit, and what ranks run."""
