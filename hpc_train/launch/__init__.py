"""From a configuration to running ranks: the job spec, the local pool, Slurm through submitit, and what ranks run."""
