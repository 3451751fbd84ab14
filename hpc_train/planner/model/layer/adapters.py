"""Adapters (LoRA, DoRA) of a block and its weights in 4 bits (QLoRA): their sizes, and the time that they add."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_train.models.adapters.nf4_sizes import NF4_BYTES
from hpc_train.models.linear_shapes import LinearShape, count_adapter_weights
from hpc_train.planner.constants import Constants
from hpc_train.planner.model.inputs import Column
from hpc_train.planner.model.jobs import Jobs, choose

_ROW_FACTOR_BYTES = 16.0
"""Bytes of each weight of a layer that DoRA needs to compute the lengths of its rows: the weight, the change before and
after it is scaled, and their sum, in fp32 (models.adapters.adapted_linear)."""


def make_adapter_columns(
    layers: Mapping[str, LinearShape], rank: float, blocks: float, dora: bool = False
) -> dict[str, float]:
    """Return the columns of jobs in which `layers` have adapters, by module name, of all blocks.

    blocks: their number; the columns are means over them. With rank 0 nothing is frozen.
    """
    chosen = layers.values()
    reads, writes = sum(layer.inputs for layer in chosen), sum(layer.outputs for layer in chosen)
    # Over tp, A of a layer that is split by outputs is whole on each rank, and B of one that is split by inputs.
    whole = {"columns": (1, 0), "rows": (0, 1), "whole": (1, 1)}
    unsplit = sum(
        whole[layer.split][0] * rank * layer.inputs + whole[layer.split][1] * (rank + dora) * layer.outputs
        for layer in chosen
    )
    # For backward an adapter stores its input, the result of A, and with DoRA the layer's result. Layers that read the
    # same tensor store it once; the result of attention is stored in any case.
    inputs = {(_find_block(name), layer.reads): layer.inputs for name, layer in layers.items()}
    split = sum(size for (_, reads), size in inputs.items() if reads == "widened")
    stored = sum(size for (_, reads), size in inputs.items() if reads in ("attention", "feed_forward"))
    unsplit_stored = stored + rank * len(chosen)
    if dora:
        split += sum(layer.outputs for layer in chosen if layer.split == "columns")
        unsplit_stored += sum(layer.outputs for layer in chosen if layer.split != "columns")
    return {
        "adapter_weights": count_adapter_weights(chosen, rank, dora) / blocks,
        "adapter_unsplit": unsplit / blocks,
        "adapter_reads": reads / blocks,
        "adapter_writes": writes / blocks,
        "adapter_stored": split / blocks,
        "adapter_stored_unsplit": unsplit_stored / blocks,
        "dora_widest": max((layer.weights for layer in chosen), default=0) if dora else 0,
    }


def _find_block(name: str) -> str:
    """Return the number of the block in a module's name; empty outside of blocks."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def adapter_seconds(jobs: Jobs, constants: Constants, tokens: Column) -> Column:
    """Return the forward seconds of a layer's adapters.

    Their products are so thin that memory bounds them: each reads its input, and writes, scales and adds its output.
    """
    # An output is written, read and written when it is scaled, and read when it is added.
    moved = tokens * (jobs.adapter_reads + 4 * jobs.adapter_writes) / jobs.tp * jobs.activation_bytes
    return (jobs.adapter_weights > 0) * moved / (jobs.memory_bandwidth * constants.memory_efficiency)


def expansion_seconds(jobs: Jobs, constants: Constants) -> Column:
    """Return the seconds of expanding a layer's weights in 4 bits once; forward, backward and recomputation each do.

    They are read in 4 bits and written in the format of computation; reading them again is part of the products.
    """
    moved = jobs.four_bit_weights / jobs.tp * (NF4_BYTES + jobs.activation_bytes)
    return moved / (jobs.memory_bandwidth * constants.memory_efficiency)


def adapter_activations(jobs: Jobs) -> tuple[Column, Column]:
    """Return the bytes per token that a layer's adapters store: (without recomputation, selective).

    Selective recomputation computes the widened input of a feed-forward layer's last product again, and stores the
    results of B, as those of any product.
    """
    item, unsplit = jobs.activation_bytes, jobs.adapter_stored_unsplit
    split = choose(jobs.dora_widest > 0, jobs.adapter_stored, 0.0) + jobs.adapter_writes
    return (jobs.adapter_stored / jobs.tp + unsplit) * item, (split / jobs.tp + unsplit) * item


def expansion_bytes(jobs: Jobs) -> Column:
    """Return the bytes of the largest weight that is expanded from 4 bits."""
    return jobs.four_bit_widest * jobs.activation_bytes / jobs.tp


def row_factor_bytes(jobs: Jobs) -> Column:
    """Return the bytes that DoRA needs to compute the lengths of the rows of the largest weight."""
    return jobs.dora_widest * _ROW_FACTOR_BYTES / jobs.tp
