"""The blocks of a part of a model, for the passes that change how each of them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hpc_train.api import Model
from hpc_train.errors import UserError

Forward = Callable[..., Any]


def blocks_of(part: nn.Module, option: str) -> list[nn.Module]:
    """The blocks in their order. Raises UserError, naming the `option` that asked, where the model has none."""
    blocks = list(part.blocks().values()) if isinstance(part, Model) else []
    if not blocks:
        raise UserError(
            f"{option}: {type(part).__name__} does not say what its blocks are (plan, blocks, stage, loss_sum); "
            f"leave it out, or give it these"
        )
    return blocks


def replace_forward(block: nn.Module, change: Callable[[Forward], Forward]) -> None:
    """Put change(block.forward) in its place.

    No module is added, so every parameter keeps its name; hooks, those of fully_shard among them, run outside of it.
    """
    block.forward = change(block.forward)
