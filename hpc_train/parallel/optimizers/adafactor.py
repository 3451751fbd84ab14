"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) over shards, with the numbers of torch.optim.Adafactor.

torch's Adafactor needs whole parameters. Here a rank has a rectangle of each parameter: sums over rows, columns and all
elements are computed locally and reduced over the mesh axes that split the summed dimension. All sums of a step over
the same axes are reduced together, in three messages. A row or a column of state is a DTensor, split like its parameter
along the dimension that it keeps, so that a checkpoint stores it as a rectangle like any other tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hpc_train._torch.dtensor import cut_dimension
from hpc_train.config.optim import AdafactorConfig
from hpc_train.parallel.optimizer_step import get_local

_LEAST_SCALE = 1e-3
"""torch's lower bound of the root mean square of a parameter, which scales its learning rate."""


class ShardedAdafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor for parameters some of which are split over ranks. Writes over the gradients in a step."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, config: AdafactorConfig) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._config = config
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _make_state(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Every rank of a parameter's mesh calls it."""
        assert closure is None
        updates = [
            _Update(parameter, self.state[parameter], group["lr"], group["weight_decay"], self._config)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # Each round needs the sums of the one before; those of all parameters go in one message for each axis.
        for add in (_Update.add_moments, _Update.add_row_means, _Update.add_update):
            sums = AxisSums()
            for update in updates:
                add(update, sums)
            sums.reduce()
        for update in updates:
            update.apply()


def _make_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.ndim < 2:
        state["variance"] = torch.zeros_like(parameter)
    else:
        state["row_var"] = _make_sums(parameter, parameter.ndim - 1)
        state["col_var"] = _make_sums(parameter, parameter.ndim - 2)
    return state


def _make_sums(parameter: Tensor, dimension: int) -> Tensor:
    """Return zeros shaped as the parameter with one entry along a dimension, split over ranks along all others."""

    def shrink(size: Sequence[int]) -> list[int]:
        return [1 if index == dimension else length for index, length in enumerate(size)]

    if not isinstance(parameter, DTensor):
        return torch.zeros(shrink(parameter.shape), dtype=parameter.dtype, device=parameter.device)
    local = parameter.to_local()
    zeros = torch.zeros(shrink(local.shape), dtype=local.dtype, device=local.device)
    placements = [
        Replicate() if cut_dimension(placement) == dimension else placement for placement in parameter.placements
    ]
    shape = torch.Size(shrink(parameter.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


class AxisSums:
    """Tensors that are added up over mesh axes, those of the same axes in one message."""

    def __init__(self) -> None:
        self._parts: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}

    def add(self, parameter: Tensor, part: Tensor, dimensions: Sequence[int]) -> None:
        """Add up `part` in place over the axes that split one of these dimensions of the parameter, once reduced."""
        if not isinstance(parameter, DTensor):
            return
        axes = tuple(
            axis for axis, placement in enumerate(parameter.placements) if cut_dimension(placement) in dimensions
        )
        if axes:
            self._parts.setdefault((parameter.device_mesh, axes), []).append(part)

    def reduce(self) -> None:
        """Send what was added."""
        for (mesh, axes), parts in self._parts.items():
            flat = torch.cat([part.flatten() for part in parts])
            for axis in axes:
                dist.all_reduce(flat, group=mesh.get_group(axis))
            totals = torch.split(flat, [part.numel() for part in parts])
            for part, total in zip(parts, totals, strict=True):
                part.copy_(total.view_as(part))


@dataclass
class _Update:
    """The update of one parameter on its way through a step."""

    parameter: nn.Parameter
    state: dict[str, Tensor]
    lr: float
    weight_decay: float
    config: AdafactorConfig
    values: Tensor = field(init=False)
    gradient: Tensor = field(init=False)
    """This rank's shard of the gradient; later the update, in the same memory."""
    squares: Tensor = field(init=False)
    """Sum of the parameter's squares."""
    rows: Tensor = field(init=False)
    columns: Tensor = field(init=False)
    """Sums of the gradient's squares along rows and along columns; not of vectors."""
    share: float = field(init=False)
    """Weight of this step in the second moments."""
    row_sum: Tensor = field(init=False)
    """Sum of the rows' second moments; not of vectors."""
    update_squares: Tensor = field(init=False)
    """Sum of the update's squares."""

    def add_moments(self, sums: AxisSums) -> None:
        """Begin the sums over the squares of the parameter, and of rows and columns of the gradient."""
        parameter = self.parameter
        all_dims = range(parameter.ndim)
        self.values, self.gradient = get_local(parameter), get_local(parameter.grad)  # type: ignore[arg-type]
        self.squares = self.values.square().sum()
        sums.add(parameter, self.squares, all_dims)
        if parameter.ndim > 1:
            squared = self.gradient.square()
            self.rows, self.columns = squared.sum(-1, keepdim=True), squared.sum(-2, keepdim=True)
            sums.add(parameter, self.rows, [parameter.ndim - 1])
            sums.add(parameter, self.columns, [parameter.ndim - 2])

    def add_row_means(self, sums: AxisSums) -> None:
        """Move the second moments, and begin the sum over the rows'."""
        state, parameter = self.state, self.parameter
        state["step"] += 1
        self.share = float(state["step"]) ** self.config.beta2_decay
        if parameter.ndim < 2:
            get_local(state["variance"]).lerp_(self.gradient.square(), self.share)
            return
        get_local(state["row_var"]).lerp_(self.rows / parameter.shape[-1], self.share)
        get_local(state["col_var"]).lerp_(self.columns / parameter.shape[-2], self.share)
        self.row_sum = get_local(state["row_var"]).sum(-2, keepdim=True)
        sums.add(parameter, self.row_sum, [parameter.ndim - 2])

    def add_update(self, sums: AxisSums) -> None:
        """Turn the gradient into the update, and begin the sum over its squares."""
        state, parameter = self.state, self.parameter
        eps = torch.finfo(parameter.dtype).eps
        if parameter.ndim < 2:
            variance = get_local(state["variance"]).clone()
        else:
            variance = get_local(state["row_var"]) @ get_local(state["col_var"])
            variance /= (self.row_sum / parameter.shape[-2]).clamp_(min=eps)
        self.gradient.mul_(variance.clamp_(min=eps**2).rsqrt_())
        self.update_squares = self.gradient.square().sum()
        sums.add(parameter, self.update_squares, range(parameter.ndim))

    def apply(self) -> None:
        """Decay the parameter and add the update, which is clipped to its root mean square."""
        count = self.parameter.numel()
        rate = min(self.lr, 1 / float(self.state["step"]) ** 0.5)
        scale = (self.squares / count).sqrt_().clamp_(min=_LEAST_SCALE) * rate
        scale /= ((self.update_squares / count).sqrt_() / self.config.clip_threshold).clamp_(min=1.0)
        if self.weight_decay:
            self.values.mul_(1 - self.lr * self.weight_decay)
        self.values.sub_(self.gradient.mul_(scale))
