"""Functions as jobs, by way of submitit: the Hydra launchers and TrainingFunction run on them."""
