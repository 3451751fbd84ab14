"""Store parameters as DTensors while the model's own code computes with plain local tensors.

With tp=2 and a linear layer whose weight (8, 4) is split by rows, after distribute_parameters:

    dict(module.named_parameters())["weight"]   DTensor (8, 4), [Shard(0)]: for optimizer, checkpoints, fully_shard
    module.weight                               Tensor (4, 4): for the module's own `F.linear(x, self.weight)`

The second is the local tensor of the first, and gradients flow back to it. torch's parallelize_module would let the
forward compute with DTensors, and then a user's forward must make one of every input and buffer. torch's parametrize
would rename the parameter. So the module's class is replaced by a subclass in which `weight` is a property.

Compiled blocks read their parameters before the graph starts (read_parameters_first), because a graph must not contain
a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hpc_train._torch.dtensor import read_local
from hpc_train.errors import UserError
from hpc_train.shard_rectangles import FusedParts


@dataclass(frozen=True)
class ParameterLayout:
    """How a parameter is placed on the tp axis, and which part of it a forward computes with.

    Experts are placed on ep instead, or on ep and tp. For example, every rank stores all rows of a key projection
    with fewer heads than ranks (Replicate), and computes with those of its `units`.
    """

    placement: Placement = field(default_factory=Replicate)
    other_placements: tuple[Placement, ...] = ()
    """Placements on further axes of the mesh."""
    partial: bool = False
    """Whether the ranks' gradients of a replicated parameter must be summed, rather than being equal: where each rank
    computes with other positions, as norms under sequence parallelism do, or with other `units`."""
    units: tuple[int, ...] | None = None
    """For a replicated parameter, the units of rows (heads) that this rank computes with; None: all rows."""
    unit_rows: int = 1
    """Rows of a unit."""
    fused: FusedParts | None = None
    """The parts along the split dimension, each of which is split: the rank stores its share of each in turn."""
    gradient_scale: float = 1.0
    """Factor on the gradient."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One an axis of the mesh."""
        return (self.placement, *self.other_placements)

    def get_local(self, parameter: Tensor) -> Tensor:
        """Return what a forward computes with, differentiably.

        A parameter that fully_shard has not gathered is returned as it is: its mesh has more axes.
        """
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > len(self.placements):
            return parameter
        local = read_local(parameter, self.partial)
        if self.gradient_scale != 1.0:
            local = _ScaleGradient.apply(local, self.gradient_scale)  # type: ignore[no-untyped-call]
        if self.units is None:
            return local
        # Not by an index tensor: to bring that from the host to a GPU would make the host wait at every read.
        units = local.view(-1, self.unit_rows, *local.shape[1:]).unbind()
        return torch.cat([units[unit] for unit in self.units])


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


ParameterLayouts = dict[tuple[nn.Module, str], ParameterLayout]
"""Layouts by (module, name of its own parameter)."""


def distribute_parameters(part: nn.Module, mesh: DeviceMesh, layouts: ParameterLayouts) -> None:
    """Turn every parameter of `part` into a DTensor on `mesh`, in place and without communication.

    A parameter without a layout is replicated, with the same gradient on each rank. From then on `module.weight` is
    what this rank computes with, while named_parameters() and the optimizer see the DTensor. Modules that
    distribute_named_parameters has seen stay as they are.
    Raises UserError where two modules share a parameter but split it differently.
    """
    distributed: dict[nn.Parameter, tuple[ParameterLayout, nn.Parameter]] = {}
    for module in part.modules():
        if hasattr(module, "_layouts"):
            continue
        module_layouts = {}
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module_layouts[name] = layouts.get((module, name), ParameterLayout())
            layout = module_layouts[name]
            if parameter not in distributed:
                distributed[parameter] = (layout, _distribute_parameter(parameter, mesh, (layout.placement,), layout))
            earlier = distributed[parameter][0]
            if (earlier.placement, earlier.fused) != (layout.placement, layout.fused):
                kind = type(part).__name__
                raise UserError(f"{kind}.plan: two modules share a parameter {name}, but split it in different ways")
            module.register_parameter(name, distributed[parameter][1])
        if module_layouts:
            _read_local(module, module_layouts)


def distribute_named_parameters(module: nn.Module, mesh: DeviceMesh, layouts: dict[str, ParameterLayout]) -> None:
    """Do the same to one module's own parameters, by name, on a mesh of its own."""
    for name, layout in layouts.items():
        parameter = module.get_parameter(name)
        module.register_parameter(name, _distribute_parameter(parameter, mesh, layout.placements, layout))
    _read_local(module, layouts)


def _read_local(module: nn.Module, layouts: dict[str, ParameterLayout]) -> None:
    """Let the module's own code read this rank's part of its parameters."""
    # By another class, because properties belong to classes. The parameters stay registered under their names, so that
    # optimizer, fully_shard and checkpoints find DTensors.
    module._layouts = layouts  # type: ignore[assignment]
    module._tensors_of_forward = {}  # type: ignore[assignment]
    module.__class__ = _make_local_class(type(module), tuple(layouts))  # type: ignore[arg-type]  # torch: __hash__(object)


def _distribute_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...], layout: ParameterLayout
) -> nn.Parameter:
    local = parameter.detach()
    for axis, placement in enumerate(placements):
        if layout.fused is not None:
            dim, share = layout.fused.dim, layout.fused.total // layout.fused.ranks
            runs = layout.fused.list_runs(mesh.get_local_rank(axis) * share, share)
            local = torch.cat([local.narrow(dim, first, length) for _, first, length in runs], dim)
        elif isinstance(placement, Shard):
            # DTensor's own rule: every rank has `chunk` rows (or columns), the last ones fewer, perhaps none.
            chunk = -(-local.shape[placement.dim] // mesh.size(axis))
            begin = min(chunk * mesh.get_local_rank(axis), local.shape[placement.dim])
            length = min(chunk, local.shape[placement.dim] - begin)
            local = local.narrow(placement.dim, begin, length).clone(memory_format=torch.contiguous_format)
    shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


@cache
def _make_local_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Make a class like `kind` whose parameters `names`, read as attributes, are this rank's local tensors.

    One class for all modules alike, so that torch.compile sees one type and compiles once.
    """
    return type(kind.__name__, (kind,), {name: _make_property(name) for name in names})


def _make_property(name: str) -> property:
    def get(module: Any) -> Tensor | None:
        if name in module._tensors_of_forward:
            local: Tensor = module._tensors_of_forward[name]
            return local
        parameter = module._parameters[name]
        return None if parameter is None else module._layouts[name].get_local(parameter)

    return property(get)


def read_parameters_first(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the compiled `forward` of `block` so that all its local tensors are read before the call, and kept for it.

    DTensors read inside a graph make its guards slow, and torch 2.13 cannot save their mesh for a backward that
    recomputes. Do not use this for eager code: a forward that runs again in backward must read its parameters again,
    because fully_shard may have gathered them again.
    """
    modules: list[Any] = [module for module in block.modules() if hasattr(module, "_layouts")]

    def read_and_run(*args: Any, **kwargs: Any) -> Any:
        for module in modules:
            names = [name for name in module._layouts if module._parameters[name] is not None]
            module._tensors_of_forward = {name: getattr(module, name) for name in names}
        try:
            return forward(*args, **kwargs)
        finally:
            for module in modules:
                module._tensors_of_forward = {}

    return read_and_run if modules else forward
