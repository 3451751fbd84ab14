"""Files of torch.save: tensors only. A pickle that would run code is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hpc_train.errors import UserError


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors in nested dictionaries, keys joined by dots; what is no tensor is left out. Mapped where it can be.

    Raises UserError for a file that torch.load(weights_only=True) does not take.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the file of torch.save")
    return dict(_tensors(_load(path)))


def _load(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # of before torch 1.6: no archive that could be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):
            raise UserError(f"{path}: is not a file of torch.save") from error
        what = str(error).partition("WeightsUnpickler error:")[2].strip().splitlines()
        why = f" ({what[0].strip()})" if what else ""
        raise UserError(
            f"{path}: holds more than tensors, and loading it could run code{why}; save its state_dict() alone"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is not a file of torch.save ({type(error).__name__}: {text})") from error


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name or "tensor", value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))
