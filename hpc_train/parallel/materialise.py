"""Give parameters and buffers their values on this rank's device; a device never holds the whole model.

A model comes from the meta device or in CPU memory. Parameters: each rank draws, or takes from the whole model, only
the part that it holds. Buffers that were built on the meta device: their modules' own reset methods are run on a copy,
and a buffer that no method can make again is refused by name, because uninitialised memory looks like values.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train._torch import is_memoryless, shard_offset
from hpc_train.errors import UserError
from hpc_train.models.deferred import DeferredValues, iterate_plain_tensors
from hpc_train.models.initial_values import Region, initialise_parameters, whole_region

ParameterValues = MutableMapping[str, Tensor]
"""Whole parameters by name, in CPU memory."""


def is_on_meta(module: nn.Module) -> bool:
    """Whether the module still has no values."""
    return any(parameter.is_meta for parameter in module.parameters())


def is_rehearsal() -> bool:
    """Whether this is `plan rehearse`: tensors have shapes but no memory, so there are no values to keep."""
    return is_memoryless(torch.empty(0))


def detach_values(model: nn.Module) -> ParameterValues:
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


def select_stage_values(part: nn.Module, source: nn.Module, made: DeferredValues | None = None) -> ParameterValues:
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


def materialise_parameters(part: nn.Module, values: ParameterValues, seed: int, device: torch.device) -> None:
    """Give a part of a model on the meta device its parameters on `device`, each rank only what it holds of them.

    values: what is there already, taken out one by one; other parameters are drawn. Buffers move as they are.
    Raises UserError if the model does not say how to draw them.
    """
    if not is_on_meta(part):
        part.to(device)
        return
    buffers = [(module, name, buffer) for module, name, buffer in _named_buffers(part) if not buffer.is_meta]
    part.to_empty(device=device)
    if any(is_memoryless(parameter) for parameter in part.parameters()):
        return
    moved: dict[int, Tensor] = {}
    for module, name, buffer in buffers:
        setattr(module, name, moved.setdefault(id(buffer), buffer.to(device)))
    if not values:
        initialise_parameters(part, seed, find_local_region)
        return
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            held, value = find_local_region(parameter), values.pop(name)
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
        for name, tensor in iterate_plain_tensors(module):
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


def _named_buffers(part: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield module, name, buffer


def find_local_region(parameter: Tensor) -> Region:
    """Return the rectangle of a parameter that this rank has."""
    if not isinstance(parameter, DTensor):
        return whole_region(parameter)
    return Region(tuple(parameter.shape), shard_offset(parameter), parameter.to_local().detach())


RESET_METHODS = (
    "reset_parameters",
    "_reset_parameters",
    "reset_running_stats",
    "reset_buffers",
    "init_buffers",
    "_init_buffers",
    "init_weights",
    "_init_weights",
    "initialize",
    "initialise",
)
"""Names of reset methods in torch, torchtitan and transformers."""
_FILLS = (0, 113)
"""Bytes to fill a buffer with before a reset; a buffer that the reset writes ends up the same with either."""


def remake_buffers(model: nn.Module, seed: int) -> list[str]:
    """Give every buffer on the meta device its value, in CPU memory; returns their names.

    A module's own resets are tried first, then those of its parent modules. Raises UserError, by name, for a buffer
    that none of them writes, and for a tensor on the meta device that is neither a parameter nor a buffer.
    """
    _check_plain(model)
    lost = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}
    tried: dict[tuple[str, str], dict[str, Tensor]] = {}
    made: dict[int, Tensor] = {}
    for name, buffer in lost.items():
        if id(buffer) not in made:
            made[id(buffer)] = _remake_buffer(model, name, seed, tried)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made[id(buffer)])
    return list(lost)


def _remake_buffer(model: nn.Module, name: str, seed: int, tried: dict[tuple[str, str], dict[str, Tensor]]) -> Tensor:
    for path in _list_parents(name.rpartition(".")[0]):
        for method in RESET_METHODS:
            if (path, method) not in tried:
                found = _find_written_buffers(model.get_submodule(path), method, seed)
                tried[path, method] = {f"{path}.{key}" if path else key: value for key, value in found.items()}
            if name in tried[path, method]:
                return tried[path, method][name]
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    raise UserError(
        f"model: {name} is a buffer on the meta device, and nothing writes its value again; give {owner} a method "
        "reset_parameters() that does, or do not build the model under torch.device('meta')"
    )


def _list_parents(path: str) -> Iterator[str]:
    """Yield a module's own path, then its parents', ending with the model's."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _find_written_buffers(module: nn.Module, method: str, seed: int) -> dict[str, Tensor]:
    """Return the buffers, by name, that a module's reset computes from the module and the seed alone."""
    if not _callable_alone(getattr(module, method, None)):
        return {}
    first, second = (_run_reset(module, method, seed, fill) for fill in _FILLS)
    return {
        name: value
        for name, value in first.items()
        if name in second and not value.is_meta and _are_equal(value, second[name])
    }


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1), b.contiguous().view(-1))


def _callable_alone(function: Any) -> bool:
    if not inspect.ismethod(function):
        return False
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _run_reset(module: nn.Module, method: str, seed: int, fill: int) -> dict[str, Tensor]:
    """Reset a copy whose buffers without values hold `fill`; returns its buffers. Parameters get no values."""
    try:
        twin = copy.deepcopy(module)
        for owner in twin.modules():
            for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_meta:
                    setattr(owner, name, torch.full_like(buffer, fill, device="cpu"))
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(seed)
            getattr(twin, method)()
    except Exception:  # the user's code, on a device it may not support
        return {}
    return dict(twin.named_buffers(remove_duplicate=False))


def _check_plain(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, tensor in iterate_plain_tensors(module):
            if tensor.is_meta and not isinstance(tensor, nn.Parameter):
                raise UserError(
                    f"model: {path}.{name}".replace(": .", ": ") + " is a tensor on the meta device that is neither a "
                    "parameter nor a buffer, so nothing gives it a value; register it as a buffer, or do not build the "
                    "model under torch.device('meta')"
                )
