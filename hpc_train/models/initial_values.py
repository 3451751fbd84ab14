"""Draw initial values from the seed, the parameter's name and the element's index: the same values in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.adapters.names import is_adapter_parameter

CHUNK_ELEMENTS = 1 << 20
"""Values drawn from one generator: small enough for a shard to skip what it does not hold."""


@dataclass(frozen=True)
class Normal:
    """A normal distribution; with std 0 a constant."""

    mean: float
    std: float


ONES = Normal(1.0, 0.0)
ZEROS = Normal(0.0, 0.0)


@dataclass(frozen=True)
class Region:
    """A rectangle of a parameter that this rank has."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offset: tuple[int, ...]
    """Index in the parameter at which `local` begins."""
    local: Tensor


@runtime_checkable
class Initialised(Protocol):
    """A model that has its own initial values."""

    def init_rule(self, name: str) -> Normal:
        """Return the distribution that the parameter `name` is drawn from."""


def gpt2_init_rule(name: str, std: float, layers: int) -> Normal:
    """Return GPT-2's rule (Radford et al. 2019, section 2.3): std / sqrt(2 layers) for what writes to the residual."""
    module, _, last = name.rpartition(".")
    if last == "bias":
        return ZEROS
    if module.endswith("norm"):
        return ONES
    writes_residual = name.endswith(("attention.o.weight", "down.weight", "experts.down"))
    return Normal(0.0, std / math.sqrt(2 * layers) if writes_residual else std)


def get_whole_region(parameter: Tensor) -> list[Region]:
    """Return the one region of a parameter that is not sharded."""
    assert not hasattr(parameter, "placements"), "a sharded parameter needs its own `find_regions`"
    return [Region(tuple(parameter.shape), (0,) * parameter.ndim, parameter.detach())]


@torch.no_grad()
def initialise_parameters(
    module: nn.Module, seed: int, find_regions: Callable[[Tensor], list[Region]] = get_whole_region
) -> None:
    """Fill every parameter in place with what the model's `init_rule` and (seed, name) say.

    `find_regions` says what a rank holds of a sharded parameter. A module without `init_rule`, such as a user's own,
    keeps what its constructor drew. Raises UserError if such a module has parameters on the meta device.
    """
    if not isinstance(module, Initialised):
        _check_materialised(module)
        return
    for name, parameter in module.named_parameters():
        if is_adapter_parameter(name):
            continue
        for part in find_regions(parameter):
            part.local.copy_(
                draw_values(module.init_rule(name), seed, name, part.shape, part.offset, tuple(part.local.shape))
            )


def draw_values(
    rule: Normal, seed: int, name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> Tensor:
    """Draw the rectangle `size` at `offset` of the parameter `name` of `shape`, float32, on the CPU.

    Whole chunks of rows are drawn, so that the cost is that of the rows that the rectangle touches.
    """
    if rule.std == 0 or math.prod(size) == 0:
        return torch.full(size, rule.mean, device="cpu")
    row = shape[1:]
    rows = max(1, CHUNK_ELEMENTS // max(1, math.prod(row)))
    begin, end = (offset[0], offset[0] + size[0]) if shape else (0, 1)
    out = torch.empty(size, device="cpu")
    for first in range(begin - begin % rows, end, rows):
        last = min(first + rows, shape[0] if shape else 1)
        chunk = torch.empty((last - first, *row), device="cpu")
        chunk.normal_(rule.mean, rule.std, generator=_make_generator(seed, name, first))
        low, high = max(begin, first), min(end, last)
        window = tuple(slice(o, o + n) for o, n in zip(offset[1:], size[1:], strict=True))
        out.view(-1, *size[1:])[low - begin : high - begin] = chunk[(slice(low - first, high - first), *window)]
    return out


def _make_generator(seed: int, name: str, row: int) -> torch.Generator:
    key = blake2b(f"{seed}/{name}/{row}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))


def _check_materialised(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            kind = type(module).__name__
            raise UserError(
                f"{kind}.{name}: on the meta device, and {kind} does not say how to draw it; give {kind} a method "
                "init_rule(name)"
            )
