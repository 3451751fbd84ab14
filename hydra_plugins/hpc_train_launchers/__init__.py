"""hydra/launcher=hpc_local and hydra/launcher=hpc_slurm. Every Hydra application imports this: nothing heavy here."""
