"""Rules of recomputation, offload, compilation and number formats."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.config.techniques import OffloadConfig, RecomputeConfig
from hpc_train.errors import UserError


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what cannot be saved."""
    parallel: ParallelConfig = config.parallel
    if parallel.recompute != RecomputeConfig():
        raise UserError("parallel.recompute: not in this version; leave it out")
    if parallel.offload != OffloadConfig():
        raise UserError("parallel.offload: not in this version; leave it out")
    if parallel.compile:
        raise UserError("parallel.compile=true: not in this version; leave it out")
    if config.precision.name == "fp16":
        raise UserError("precision=fp16: needs loss scaling, which is not in this version; use precision=bf16")
