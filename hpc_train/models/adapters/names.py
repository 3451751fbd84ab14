"""Names of an adapter's parameters, and of the layers that have adapters, in a separate module that needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from hpc_train.errors import UserError

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


def choose_targets(
    layers: Sequence[str], globs: Sequence[str], describe_others: Callable[[str], str] = lambda glob: ""
) -> list[str]:
    """Return the linear layers, of all `layers` of a model, that adapter.targets names, in the model's order.

    describe_others: what else a glob without a layer means, for the message. Raises UserError for such a glob.
    """
    matched = {glob: [name for name in layers if matches_target(name, glob)] for glob in globs}
    for glob, names in matched.items():
        if not names:
            why = describe_others(glob) or f"; the nearest are {', '.join(_list_close_names(layers, glob))}"
            raise UserError(f"adapter.targets: {glob!r} matches no linear layer{why}")
    targets = {name for names in matched.values() for name in names}
    return [name for name in layers if name in targets]


def matches_target(name: str, glob: str) -> bool:
    """Return whether a glob names a module by its whole name or, like PEFT's target_modules, by the end of it."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def _list_close_names(layers: Sequence[str], glob: str) -> list[str]:
    ends = sorted({name.rpartition(".")[2] for name in layers})
    return difflib.get_close_matches(glob, [*layers, *ends], n=3, cutoff=0.4) or ends[:8]
