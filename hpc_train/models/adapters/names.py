"""Names of an adapter's parameters (models/adapters/adapted_linear.py), in a module of its own that needs no torch."""

from __future__ import annotations

ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
ADAPTER_LEAVES = (ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE)
"""Attributes of the layer: A (rank, inputs), B (outputs, rank), and DoRA's m - |W| (outputs,)."""


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter of this name, in the whole model, belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_LEAVES
