"""Find different tensors of a model that share memory: splitting or moving them would make copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.deferred import plain_tensors


def check_aliases(model: nn.Module, splits: bool, device: torch.device) -> None:
    """Raise UserError, by name, for tensors that would silently stop following a parameter.

    splits: parameters are cut over ranks. Without that, on the CPU, nothing moves and everything stays as it is. A
    parameter held by several modules is one tensor, not an alias.
    """
    if not splits and device.type == "cpu":
        return
    owners: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        other = owners.setdefault(_memory(parameter), (name, parameter)) if _has_memory(parameter) else None
        if other is not None and other[1] is not parameter:
            raise UserError(
                f"model: {name} and {other[0]} are two parameters in the same memory, which are not the same once they "
                "are split or moved; assign one nn.Parameter to both"
            )
    for kind, name, tensor in _others(model, splits):
        if _has_memory(tensor) and (owner := owners.get(_memory(tensor))) is not None:
            raise UserError(
                f"model: {name}, {kind}, shares the memory of the parameter {owner[0]}, and would no longer follow it "
                "once that is split or moved; compute it in forward, or use the parameter's own attribute there"
            )


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > 0


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _others(model: nn.Module, splits: bool) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) for buffers and, if parameters are replaced, for other tensors held by modules."""
    for name, buffer in model.named_buffers():
        yield "a buffer", name, buffer
    for path, module in model.named_modules() if splits else ():
        if isinstance(module, nn.RNNBase):
            continue  # updates its own list of parameters
        for name, tensor in plain_tensors(module):
            if f"{name}_orig" not in dict(module.named_parameters(recurse=False)):  # spectral_norm recomputes it
                yield "a tensor held beside the parameters", f"{path}.{name}" if path else name, tensor
