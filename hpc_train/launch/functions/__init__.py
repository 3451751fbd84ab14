"""Jobs that are Python functions from elsewhere, such as Hydra: submitit's executors, whose jobs tell their end."""
