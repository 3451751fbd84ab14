"""Give parameters and buffers their values on this rank's device, without the whole model on any device.

A model comes from the meta device or in CPU memory. Each rank draws, or copies from the whole model, only its own part
of a parameter. The values of buffers on the meta device are computed by their modules' own reset methods, on a copy of
the module; a buffer that no method can compute is refused by name, because uninitialised memory looks like values.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train._torch.tensors import is_memoryless
from hpc_train.errors import UserError
from hpc_train.models.adapters.adapted_linear import initialise_adapters
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.adapters.nf4 import NF4_CODES, NF4_SCALES, quantize
from hpc_train.models.deferred import DeferredValues, iterate_plain_tensors
from hpc_train.models.initial_values import Region, initialise_parameters
from hpc_train.shard_rectangles import find_fused_parts, list_rectangles

ParameterValues = MutableMapping[str, Tensor]
"""Whole parameters by name, in CPU memory."""


def is_on_meta(module: nn.Module) -> bool:
    """Return whether the module has parameters without values."""
    return any(parameter.is_meta for parameter in module.parameters())


def is_rehearsal() -> bool:
    """Return whether this is `plan rehearse`, in which tensors have shapes but no memory."""
    return is_memoryless(torch.empty(0))


def detach_values(model: nn.Module) -> ParameterValues:
    """Take the values out of a model's parameters, which move to the meta device; buffers keep theirs.

    Modules that share a parameter share the new one.
    """
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in copies:
                empty = torch.empty_like(parameter, device="meta")
                copies[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                copies[parameter].__dict__.update(parameter.__dict__)
            setattr(module, name, copies[parameter])  # not register_parameter: RNNs update their own list in setattr
    return values


def select_stage_values(part: nn.Module, source: nn.Module, deferred: DeferredValues | None) -> ParameterValues:
    """Return the values of a stage's parameters from the whole model; empty if the model has none either.

    deferred: the model's values, if they are computed on request.
    """
    values = {name: parameter.detach() for name, parameter in source.named_parameters(remove_duplicate=False)}
    missing = [name for name, _ in part.named_parameters() if name not in values]
    if missing:
        kind = type(source).__name__
        raise UserError(f"{kind}.stage: its part has a parameter {missing[0]}, which {kind} has not; keep the names")
    if deferred is not None:
        return deferred.subset(name for name, _ in part.named_parameters() if not is_adapter_parameter(name))
    return {name: values[name] for name, _ in part.named_parameters() if not values[name].is_meta}


def materialise_parameters(part: nn.Module, values: ParameterValues, seed: int, device: torch.device) -> None:
    """Give a part of a model on the meta device its parameters on `device`; each rank gets only its own shards.

    values: values of all parameters, removed one by one; if empty, the parameters are drawn. Buffers keep their values.
    Raises UserError if the model does not tell how to draw them.
    """
    if not is_on_meta(part):
        part.to(device)
        initialise_adapters(part, seed, make_region_finder(part))
        return
    buffers = [(module, name, buffer) for module, name, buffer in _iterate_buffers(part) if not buffer.is_meta]
    _allocate_parameters(part, device)
    # A rehearsal has no memory to fill.
    if any(is_memoryless(parameter) for parameter in part.parameters()):
        return
    # A buffer that several modules share stays one tensor.
    moved: dict[int, Tensor] = {}
    for module, name, buffer in buffers:
        setattr(module, name, moved.setdefault(id(buffer), buffer.to(device)))
    find_regions = make_region_finder(part)
    if not values:
        initialise_parameters(part, seed, find_regions)
        initialise_adapters(part, seed, find_regions)
        return
    with torch.no_grad():
        parameters = dict(part.named_parameters())
        for name, parameter in parameters.items():
            layer, _, leaf = name.rpartition(".")
            if is_adapter_parameter(name) or leaf == NF4_SCALES:
                continue
            regions = find_regions(parameter)
            if leaf == NF4_CODES:
                weight = values.pop(f"{layer}.weight")
                for codes, scales in zip(regions, find_regions(parameters[f"{layer}.{NF4_SCALES}"]), strict=True):
                    _quantize_window(codes, scales, weight)
                continue
            value = values.pop(name)
            for region in regions:
                window = tuple(slice(o, o + n) for o, n in zip(region.offset, region.local.shape, strict=True))
                region.local.copy_(value[window])
    initialise_adapters(part, seed, find_regions)


def _quantize_window(codes: Region, scales: Region, weight: Tensor) -> None:
    """Fill what this rank has of a weight in NF4 from the whole weight, of which only this part is read.

    Two numbers are a byte of the codes, so a rank's first column of codes is half its first column of the weight.
    """
    (row, column), (rows, columns) = codes.offset, codes.local.shape
    if codes.local.numel():
        new_codes, new_scales = quantize(weight[row : row + rows, 2 * column : 2 * (column + columns)])
        codes.local.copy_(new_codes)
        scales.local.copy_(new_scales)


def _allocate_parameters(part: nn.Module, device: torch.device) -> None:
    """Give every tensor of `part` memory on `device`. Modules that share a parameter still do: to_empty parts them."""
    owners = [
        (module, name, parameter)
        for module in part.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    part.to_empty(device=device)
    by_identity: dict[int, nn.Parameter] = {}
    for module, name, parameter in owners:
        allocated = module._parameters[name]
        assert allocated is not None
        if (shared := by_identity.setdefault(id(parameter), allocated)) is not allocated:
            setattr(module, name, shared)


@torch.no_grad()
def adopt_buffers(part: nn.Module, source: nn.Module) -> None:
    """Copy the buffers and other tensors of the whole model to a stage on the meta device.

    Raises UserError for one that the model does not have.
    """
    kind = type(source).__name__
    for path, module in part.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                setattr(module, name, _get_source_tensor(source, path, name, kind).clone())
        for name, tensor in iterate_plain_tensors(module):
            if tensor.is_meta:
                if not isinstance(getattr(module, name, None), Tensor):
                    raise UserError(f"{kind}.stage: {path}.{name} is on the meta device; register it as a buffer")
                setattr(module, name, _get_source_tensor(source, path, name, kind))


def _get_source_tensor(source: nn.Module, path: str, name: str, kind: str) -> Tensor:
    try:
        value = getattr(source.get_submodule(path), name)
    except AttributeError:
        value = None
    if not isinstance(value, Tensor) or value.is_meta:
        full = f"{path}.{name}" if path else name
        raise UserError(f"{kind}.stage: its part has a buffer {full}, whose value {kind} has not; keep the names")
    return value


def _iterate_buffers(part: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield module, name, buffer


def make_region_finder(part: nn.Module) -> Callable[[Tensor], list[Region]]:
    """Return a function that finds this rank's rectangles of a parameter of `part`."""
    fused: dict[Any, Any] = dict(find_fused_parts(part))

    def find_regions(parameter: Tensor) -> list[Region]:
        rectangles = list_rectangles(parameter, fused.get(parameter))
        return [Region(tuple(parameter.shape), offset, local) for offset, local in rectangles]

    return find_regions


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
"""Bytes to fill a buffer with before a reset: a buffer that the reset writes ends up equal with both."""


def remake_buffers(model: nn.Module, seed: int) -> list[str]:
    """Compute the value of every buffer on the meta device, in CPU memory; returns their names.

    The module's own reset methods are tried first, then those of its parents. Raises UserError, by name, for a buffer
    that none of them writes, and for a tensor on the meta device that is neither a parameter nor a buffer.
    """
    _check_plain(model)
    missing = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}
    tried: dict[tuple[str, str], dict[str, Tensor]] = {}
    new_buffers: dict[int, Tensor] = {}
    for name, buffer in missing.items():
        if id(buffer) not in new_buffers:
            new_buffers[id(buffer)] = _remake_buffer(model, name, seed, tried)
        module_name, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module_name), leaf, new_buffers[id(buffer)])
    return list(missing)


def _remake_buffer(model: nn.Module, name: str, seed: int, tried: dict[tuple[str, str], dict[str, Tensor]]) -> Tensor:
    for path in _list_parents(name.rpartition(".")[0]):
        for method in RESET_METHODS:
            if (path, method) not in tried:
                values = _find_written_buffers(model.get_submodule(path), method, seed)
                tried[path, method] = {f"{path}.{key}" if path else key: value for key, value in values.items()}
            if name in tried[path, method]:
                return tried[path, method][name]
    class_name = type(model.get_submodule(name.rpartition(".")[0])).__name__
    raise UserError(
        f"model: {name} is a buffer on the meta device, and nothing writes its value again; give {class_name} a method "
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
    if not _needs_no_arguments(getattr(module, method, None)):
        return {}
    first, second = (_run_reset(module, method, seed, fill) for fill in _FILLS)
    return {
        name: value
        for name, value in first.items()
        if name in second and not value.is_meta and _are_equal(value, second[name])
    }


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1), b.contiguous().view(-1))


def _needs_no_arguments(function: Any) -> bool:
    if not inspect.ismethod(function):
        return False
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _run_reset(module: nn.Module, method: str, seed: int, fill: int) -> dict[str, Tensor]:
    """Reset a copy of the module, with `fill` in buffers without values; returns its buffers."""
    try:
        module_copy = copy.deepcopy(module)
        for submodule in module_copy.modules():
            for name, buffer in list(submodule.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_meta:
                    setattr(submodule, name, torch.full_like(buffer, fill, device="cpu"))
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(seed)
            getattr(module_copy, method)()
    except Exception:  # the user's code, on a device it may not support
        return {}
    return dict(module_copy.named_buffers(remove_duplicate=False))


def _check_plain(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, tensor in iterate_plain_tensors(module):
            if tensor.is_meta and not isinstance(tensor, nn.Parameter):
                raise UserError(
                    f"model: {path}.{name}".replace(": .", ": ") + " is a tensor on the meta device that is neither a "
                    "parameter nor a buffer, so nothing gives it a value; register it as a buffer, or do not build the "
                    "model under torch.device('meta')"
                )
