"""Choose the device of a command that uses a model in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name; None: the GPU where there is one. Raises UserError for a missing GPU."""
    import torch

    from hpc_train.errors import UserError

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU here; leave it out")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
