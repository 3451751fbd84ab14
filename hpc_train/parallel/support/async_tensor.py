"""Rules of asynchronous tensor parallelism, where tp > 1."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.model import VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.support.pipeline import splits_backward

_OPTION = "parallel.tensor.asynchronous=true"


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what does not go with it."""
    parallel = config.parallel
    if not parallel.tensor.asynchronous:
        return
    if not parallel.tensor.sequence:
        raise UserError(f"{_OPTION}: overlaps the exchange of positions; use parallel.tensor.sequence=true")
    if isinstance(config.model, VisionTransformerConfig):
        raise UserError(
            f"{_OPTION}: overlaps the exchange of positions, and a vision transformer's do not divide; leave it out"
        )
    if parallel.recompute.mode == "selective" and "mm" in parallel.recompute.keep:
        raise UserError(
            f"{_OPTION}: computes products in parts, which parallel.recompute.mode=selective cannot keep; "
            "use parallel.recompute.keep=[attention], or mode=full"
        )
    schedule = parallel.pipeline.schedule
    if degrees.pp > 1 and splits_backward(parallel.pipeline):
        raise UserError(
            f"{_OPTION}: computes the gradients of activations and weights together, and "
            f"parallel.pipeline.schedule={schedule} asks for each by itself; use 1f1b or interleaved_1f1b"
        )
