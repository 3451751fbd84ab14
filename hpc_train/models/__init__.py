"""Models: the transformer and the vision transformer of conf/model, and the registry for users' own.

Importing this package does not import torch.
"""

from hpc_train.models.registry import build_model, register

__all__ = ["build_model", "register"]
