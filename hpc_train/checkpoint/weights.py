"""Steps without optimizer state: saved beside the full ones, or imported. A run that resumes from one starts anew.

checkpoints/weights/step-<n>   those of checkpoint.weights_every; in a directory of their own, so that neither retention
                               nor checkpoint.resume=auto sees them
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_train.api import Piece
from hpc_train.checkpoint.catalogue import locate, readable

WEIGHTS = "weights"
"""Directory, within that of the checkpoints."""
_OPTIMIZER = "optim."
_MARK = "weights_only"


def is_weight(name: str) -> bool:
    """Whether a tensor is a parameter or a buffer, not state of the optimizer (api.Piece)."""
    return not name.startswith(_OPTIMIZER)


def weights_of(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces that a step without optimizer state has."""
    return [piece for piece in pieces if is_weight(piece.name)]


def marked(extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` of a step without optimizer state; only this tells it from one whose optimizer has none."""
    return {**extra, _MARK: True}


def holds_weights_only(extra: dict[str, Any]) -> bool:
    """Whether a step was saved without optimizer state."""
    return bool(extra.get(_MARK, False))


def is_weights_only(directory: Path, step: int) -> bool:
    """The same of a committed step; False where its manifest is damaged, which loading will say."""
    manifest = readable(locate(directory, step), step)
    return manifest is not None and holds_weights_only(manifest.extra)
