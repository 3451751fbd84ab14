"""Parameters that are DTensors at rest, while the model's own code computes with plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hpc_train.errors import UserError


@dataclass(frozen=True)
class ParameterHolding:
    """How a parameter lies on the ranks of a mesh axis, and what of it a forward sees."""

    placement: Placement = field(default_factory=Replicate)
    partial: bool = False
    """The ranks' gradients of a replicated parameter are summands, not copies."""
    units: tuple[int, ...] | None = None
    """Of a replicated parameter, the equal parts of its rows that this rank computes with; None: all rows."""
    unit: int = 1
    """Rows of such a part."""

    def view(self, parameter: Tensor) -> Tensor:
        """What a forward computes with, differentiable. What fully_shard has not gathered passes as it is."""
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
            return parameter
        local = parameter.to_local(grad_placements=(Partial(),) if self.partial else None)
        if self.units is None:
            return local
        index = torch.tensor(self.units, device=local.device)
        return local.view(-1, self.unit, *local.shape[1:]).index_select(0, index).flatten(0, 1)


ParameterHoldings = dict[tuple[nn.Module, str], ParameterHolding]
"""By module and the name of its own parameter."""


def distribute_parameters(part: nn.Module, mesh: DeviceMesh, holdings: ParameterHoldings) -> None:
    """Turn every parameter of `part` into a DTensor on `mesh`, in place and without communication.

    One that has no holding is replicated, with the same gradient on each rank. In a forward `module.weight` is from
    then on what this rank computes with, while named_parameters() and the optimizer see the DTensor.
    Raises UserError where two modules share a parameter and would hold it differently.
    """
    placed: dict[nn.Parameter, tuple[Placement, nn.Parameter]] = {}
    for module in part.modules():
        views = {}
        for name, parameter in _list_own_parameters(module):
            views[name] = holdings.get((module, name), ParameterHolding())
            placement = views[name].placement
            if parameter not in placed:
                placed[parameter] = (placement, _distribute_parameter(parameter, mesh, placement))
            if placed[parameter][0] != placement:
                kind = type(part).__name__
                raise UserError(f"{kind}.plan: two modules share a parameter {name}, but split it in different ways")
            module.register_parameter(name, placed[parameter][1])
        if views:
            module._local_views = views  # type: ignore[assignment]
            module._local_tensors = {}  # type: ignore[assignment]
            module.__class__ = _make_viewing_class(type(module), tuple(views))  # type: ignore[arg-type]  # torch: __hash__(object)


def _list_own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(list(module.named_parameters(recurse=False, remove_duplicate=False)))


def _distribute_parameter(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    local = parameter.detach()
    if isinstance(placement, Shard):
        chunk = -(-local.shape[placement.dim] // mesh.size())
        begin = min(chunk * mesh.get_local_rank(), local.shape[placement.dim])
        length = min(chunk, local.shape[placement.dim] - begin)
        local = local.narrow(placement.dim, begin, length).clone(memory_format=torch.contiguous_format)
    shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
    tensor = DTensor.from_local(local, mesh, (placement,), run_check=False, shape=shape, stride=stride)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


@cache
def _make_viewing_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class like `kind` whose parameters `names`, read as attributes, are this rank's."""
    return type(kind.__name__, (kind,), {name: _make_view(name) for name in names})


def _make_view(name: str) -> property:
    def get(module: Any) -> Tensor | None:
        if name in module._local_tensors:
            local: Tensor = module._local_tensors[name]
            return local
        parameter = module._parameters[name]
        return None if parameter is None else module._local_views[name].view(parameter)

    return property(get)


def read_parameters_first(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` of `block` so that the local tensors of all its parameters are read before the call.

    For a compiled forward: DTensors read inside a graph make its guards slow, and torch 2.13 cannot save their mesh for
    a backward that recomputes. Do not use this for eager code: a forward that runs again in backward outside a graph
    must read its parameters again, because fully_shard may have gathered them again.
    """
    owners: list[Any] = [module for module in block.modules() if hasattr(module, "_local_views")]

    def call(*args: Any, **kwargs: Any) -> Any:
        for owner in owners:
            owner._local_tensors = {
                name: getattr(owner, name) for name in owner._local_views if _has_parameter(owner, name)
            }
        try:
            return forward(*args, **kwargs)
        finally:
            for owner in owners:
                owner._local_tensors = {}

    return call if owners else forward


def _has_parameter(module: nn.Module, name: str) -> bool:
    return module._parameters[name] is not None
