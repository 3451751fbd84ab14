"""Sums of a few bytes that every step takes over all ranks: they cost latency only."""

from __future__ import annotations

from hpc_train.traffic.flow import Flow


def scalars(axes: tuple[str, ...], norm: bool) -> list[Flow]:
    """The number of targets and of ranks asked to stop, the loss, and the gradient norm where it is not known."""
    if not axes:
        return []
    return [
        Flow(axes, "all_reduce", 16, 1, "number of targets"),
        Flow(axes, "all_reduce", 8, 2 if norm else 1, "loss and gradient norm" if norm else "loss"),
    ]
