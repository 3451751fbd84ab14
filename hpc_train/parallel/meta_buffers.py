"""Give buffers that the user built on the meta device their values, by the modules' own reset methods.

No rule draws a buffer, and uninitialised memory looks like values. So a buffer whose value cannot be made again is
refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.deferred import plain_tensors

RESETS = (
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
            made[id(buffer)] = _remade(model, name, seed, tried)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made[id(buffer)])
    return list(lost)


def _remade(model: nn.Module, name: str, seed: int, tried: dict[tuple[str, str], dict[str, Tensor]]) -> Tensor:
    for path in _around(name.rpartition(".")[0]):
        for method in RESETS:
            if (path, method) not in tried:
                found = _written(model.get_submodule(path), method, seed)
                tried[path, method] = {f"{path}.{key}" if path else key: value for key, value in found.items()}
            if name in tried[path, method]:
                return tried[path, method][name]
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    raise UserError(
        f"model: {name} is a buffer on the meta device, and nothing writes its value again; give {owner} a method "
        "reset_parameters() that does, or do not build the model under torch.device('meta')"
    )


def _around(path: str) -> Iterator[str]:
    """Yield a module's own path, then its parents', ending with the model's."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _written(module: nn.Module, method: str, seed: int) -> dict[str, Tensor]:
    """Return the buffers, by name, that a module's reset computes from the module and the seed alone."""
    if not _callable_alone(getattr(module, method, None)):
        return {}
    first, second = (_run(module, method, seed, fill) for fill in _FILLS)
    return {
        name: value
        for name, value in first.items()
        if name in second and not value.is_meta and _same(value, second[name])
    }


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1), b.contiguous().view(-1))


def _callable_alone(function: Any) -> bool:
    if not inspect.ismethod(function):
        return False
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _run(module: nn.Module, method: str, seed: int, fill: int) -> dict[str, Tensor]:
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
        for name, tensor in plain_tensors(module):
            if tensor.is_meta and not isinstance(tensor, nn.Parameter):
                raise UserError(
                    f"model: {path}.{name}".replace(": .", ": ") + " is a tensor on the meta device that is neither a "
                    "parameter nor a buffer, so nothing gives it a value; register it as a buffer, or do not build the "
                    "model under torch.device('meta')"
                )
