"""Names of an adapter's parameters (models/adapters/adapted_linear.py), in a separate module that needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
ADAPTER_LEAVES = (ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE)
"""Attributes of the layer: A (rank, inputs), B (outputs, rank), and DoRA's m - |W| (outputs,).

Where the weight is (inputs, outputs), as in Conv1D of transformers, A and B are transposed, too."""


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter of this name, in the whole model, belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_LEAVES


def is_transposed(weight: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether a layer of these shapes has its weight as (inputs, outputs), and A and B transposed with it."""
    return tuple(weight) == (a[0], b[1]) and tuple(weight) != (b[0], a[1])
