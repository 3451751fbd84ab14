"""Adapters (LoRA, DoRA) of a block: their weights, and the time that they add to its linear layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import Column
from hpc_train.planner.model.jobs import Jobs


def list_linear_shapes(
    hidden: float, queries: float, keys: float, feed_forward: float, branches: float, fused: bool = False
) -> dict[str, tuple[float, float]]:
    """Return (inputs, outputs) of each linear layer of a dense block, by name.

    queries, keys: widths of all query heads and of all key heads. branches: 2 where the feed-forward layer is gated.
    fused: queries, keys and values come from one layer, `qkv`.
    """
    inputs = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys)}
    shapes = {"qkv": (hidden, queries + 2 * keys)} if fused else inputs
    shapes["o"] = (queries, hidden)
    if branches == 2:
        shapes["gate"] = (hidden, feed_forward)
    return shapes | {"up": (hidden, feed_forward), "down": (feed_forward, hidden)}


def make_adapter_columns(
    shapes: Mapping[str, tuple[float, float]], chosen: Collection[str], rank: float, dora: bool = False
) -> dict[str, float]:
    """Return the columns of jobs whose layers `chosen` have adapters; without layers or with rank 0 nothing is frozen.

    shapes: (inputs, outputs) by name.
    """
    reads = sum(shapes[name][0] for name in chosen)
    writes = sum(shapes[name][1] for name in chosen)
    # A and B have rank x (inputs + outputs) numbers together, and the magnitude of DoRA one for each output.
    weights = rank * (reads + writes) + dora * writes
    return {"adapter_weights": weights, "adapter_reads": reads, "adapter_writes": writes}


def adapter_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the forward seconds of a layer's adapters.

    Their products are so thin that memory bounds them: each reads its input, and writes, scales and adds its output.
    """
    # An output is written, read and written when it is scaled, and read when it is added.
    moved = tokens * (jobs.adapter_reads + 4 * jobs.adapter_writes) / jobs.tp * jobs.activation_bytes
    return (jobs.adapter_weights > 0) * moved / (jobs.memory_bandwidth * constants.memory_efficiency)
