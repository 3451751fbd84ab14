"""Rules of recomputation, of compilation and of number formats."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.config.techniques import RecomputeConfig
from hpc_train.errors import UserError
from hpc_train.parallel.support.pipeline import splits_backward


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what cannot be saved."""
    _check_recompute(config.parallel.recompute)
    _check_schedule(config, degrees)


def _check_recompute(recompute: RecomputeConfig) -> None:
    mode, default = recompute.mode, RecomputeConfig()
    if mode == "none" and recompute.every != default.every:
        raise UserError(f"parallel.recompute.every={recompute.every}: without effect at mode=none; use full, selective")
    if mode != "selective" and recompute.keep != default.keep:
        raise UserError(f"parallel.recompute.keep: without effect at mode={mode}; use mode=selective")
    if mode == "selective" and not recompute.keep:
        raise UserError("parallel.recompute.keep=[]: selective without anything to keep; use mode=full")
    if mode == "selective" and recompute.offload:
        raise UserError(
            "parallel.recompute.offload=true: what mode=selective keeps cannot be moved; use mode=full or mode=none"
        )


def _check_schedule(config: RunConfig, degrees: Degrees) -> None:
    """torch would recompute a block once for each of its matrices in a split backward, and fail at mode=selective."""
    pipeline, mode = config.parallel.pipeline, config.parallel.recompute.mode
    if degrees.pp > 1 and mode != "none" and splits_backward(pipeline):
        raise UserError(
            f"parallel.recompute.mode={mode}: parallel.pipeline.schedule={pipeline.schedule} splits backward, and "
            "would recompute a block for each of its parameters; use 1f1b or interleaved_1f1b, or mode=none"
        )
