"""Rules of what is done to the gradients of ddp on their way: compression, the MPI library, odd models."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.config.techniques import CompressionConfig
from hpc_train.errors import UserError


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what cannot be done to gradients."""
    parallel = config.parallel
    if parallel.compression != CompressionConfig():
        raise UserError("parallel.compression: not in this version; leave it out")
    for name in ("static_graph", "unused_parameters", "sync_batchnorm"):
        if getattr(parallel, name):
            raise UserError(f"parallel.{name}=true: not in this version; leave it out")
    if parallel.reduce_with != "torch":
        raise UserError(f"parallel.reduce_with={parallel.reduce_with}: not in this version; use torch")
