"""From the meta device to real values: each rank makes only what it holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.compat import is_pretended, shard_offset
from hpc_train.models.init import Region, initialise, whole


def is_meta(module: nn.Module) -> bool:
    """Whether the module still has no values."""
    return any(parameter.is_meta for parameter in module.parameters())


def materialise(part: nn.Module, source: nn.Module, seed: int, device: torch.device) -> None:
    """Give a part of a model on the meta device its values: those of `source`, or drawn where that has none either.

    Raises UserError if the model does not say how to draw them.
    """
    if not is_meta(part):
        return
    drawn = is_meta(source)  # asked first, because `source` may be `part`
    part.to_empty(device=device)
    if any(is_pretended(parameter) for parameter in part.parameters()):
        return  # a rehearsal: shapes without memory, so without values
    if drawn:
        initialise(part, seed, region)
        return
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            held = region(parameter)
            window = tuple(slice(o, o + n) for o, n in zip(held.offset, held.local.shape, strict=True))
            held.local.copy_(values[name].detach()[window])


def region(parameter: Tensor) -> Region:
    """What this rank holds of a parameter."""
    if not isinstance(parameter, DTensor):
        return whole(parameter)
    return Region(tuple(parameter.shape), shard_offset(parameter), parameter.to_local().detach())
