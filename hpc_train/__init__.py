"""hpc_train: describe, plan, submit, place, train, checkpoint and resume PyTorch runs on Slurm clusters.

Importing this package is cheap: torch is imported by the rooms that need it, never here.
"""

__version__ = "0.1.0"
