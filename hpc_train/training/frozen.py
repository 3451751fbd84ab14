"""What a save has of parameters that are never trained."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hpc_train.api import Piece


def frozen_names(model: nn.Module) -> frozenset[str]:
    """The parameters that are never trained."""
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def incremental_advice(frozen: frozenset[str], pieces: Iterable[Piece]) -> str | None:
    """A line for who saves all of it every time, where most of what this rank saves is frozen; None elsewhere."""
    total = still = 0
    for piece in pieces:
        if piece.replica == 0:
            total += piece.local.nbytes
            still += piece.local.nbytes if piece.name in frozen else 0
    if 2 * still <= total:
        return None
    return (
        f"{still / total:.0%} of what a save writes is of frozen parameters: with checkpoint.incremental=true they are "
        "written once"
    )
