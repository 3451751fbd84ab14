"""Materialise what each rank holds, from the meta device or a whole model in CPU memory; never whole on a device."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.compat import is_pretended, shard_offset
from hpc_train.errors import UserError
from hpc_train.models.deferred import DeferredValues, plain_tensors
from hpc_train.models.init import Region, initialise, whole

Values = MutableMapping[str, Tensor]
"""Whole parameters by name, in CPU memory."""


def is_meta(module: nn.Module) -> bool:
    """Whether the module still has no values."""
    return any(parameter.is_meta for parameter in module.parameters())


def is_rehearsal() -> bool:
    """Whether this is `plan rehearse`: tensors have shapes but no memory, so there are no values to keep."""
    return is_pretended(torch.empty(0))


def detach_values(model: nn.Module) -> Values:
    """Take the parameters' values out of a model and leave its parameters on the meta device; buffers stay.

    Modules that share a parameter share the new one.
    """
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                empty = torch.empty_like(parameter, device="meta")
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                made[parameter].__dict__.update(parameter.__dict__)
            setattr(module, name, made[parameter])  # not register_parameter: RNNs keep a list of parameters
    return values


def values_of(part: nn.Module, source: nn.Module, made: DeferredValues | None = None) -> Values:
    """Return the values of a stage's parameters from the whole model it is part of; empty if that has none either.

    made: the model's values, if they are made on request.
    """
    values = {name: parameter.detach() for name, parameter in source.named_parameters(remove_duplicate=False)}
    missing = [name for name, _ in part.named_parameters() if name not in values]
    if missing:
        kind = type(source).__name__
        raise UserError(f"{kind}.stage: its part has a parameter {missing[0]}, which {kind} has not; keep the names")
    if made is not None:
        return made.subset(name for name, _ in part.named_parameters())
    return {name: values[name] for name, _ in part.named_parameters() if not values[name].is_meta}


def materialise(part: nn.Module, values: Values, seed: int, device: torch.device) -> None:
    """Give a part of a model on the meta device its parameters on `device`, each rank only what it holds of them.

    values: what is there already, taken out one by one; other parameters are drawn. Buffers move as they are.
    Raises UserError if the model does not say how to draw them.
    """
    if not is_meta(part):
        part.to(device)
        return
    buffers = [(module, name, buffer) for module, name, buffer in _buffers(part) if not buffer.is_meta]
    part.to_empty(device=device)
    if any(is_pretended(parameter) for parameter in part.parameters()):
        return
    moved: dict[int, Tensor] = {}
    for module, name, buffer in buffers:
        setattr(module, name, moved.setdefault(id(buffer), buffer.to(device)))
    if not values:
        initialise(part, seed, region)
        return
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            held, value = region(parameter), values.pop(name)
            window = tuple(slice(o, o + n) for o, n in zip(held.offset, held.local.shape, strict=True))
            held.local.copy_(value[window])


@torch.no_grad()
def adopt_buffers(part: nn.Module, source: nn.Module) -> None:
    """Copy the whole model's buffers, and its tensors that are not buffers, to a stage on the meta device.

    Raises UserError for one that the model does not have.
    """
    kind = type(source).__name__
    for path, module in part.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                setattr(module, name, _of_source(source, path, name, kind).clone())
        for name, tensor in plain_tensors(module):
            if tensor.is_meta:
                if not isinstance(getattr(module, name, None), Tensor):
                    raise UserError(f"{kind}.stage: {path}.{name} is on the meta device; register it as a buffer")
                setattr(module, name, _of_source(source, path, name, kind))


def _of_source(source: nn.Module, path: str, name: str, kind: str) -> Tensor:
    try:
        value = getattr(source.get_submodule(path), name)
    except AttributeError:
        value = None
    if not isinstance(value, Tensor) or value.is_meta:
        full = f"{path}.{name}" if path else name
        raise UserError(f"{kind}.stage: its part has a buffer {full}, whose value {kind} has not; keep the names")
    return value


def _buffers(part: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield module, name, buffer


def region(parameter: Tensor) -> Region:
    """What this rank holds of a parameter."""
    if not isinstance(parameter, DTensor):
        return whole(parameter)
    return Region(tuple(parameter.shape), shard_offset(parameter), parameter.to_local().detach())
