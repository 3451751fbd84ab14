"""An optimizer that updates a part of the parameters at a time, with its state in CPU memory or in a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.compat import set_local
from hpc_train.parallel.zero.offload_file import FileMemory

PART_MIB = 64.0
"""Bytes of parameters that are updated together: bounds what is in memory at once, but for a larger parameter."""


class PlacedOptimizer(torch.optim.Optimizer):
    """Does what `inner` would do, to the bit, on the device `place`, one part of the parameters after the other.

    A parameter that lives elsewhere has a copy there, which `inner` updates. Its state is kept at `place`, which may be
    in files. Gradients are freed as they are used.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        place: torch.device,
        files: FileMemory | None,
        state_in_files: bool,
        part_mib: float = PART_MIB,
    ) -> None:
        """inner: over sharded parameters, before its first step. files: where parameters or its state are, if any."""
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        self._twins = {p: p if _local(p).device == place else _copied(p, place) for p in parameters}
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        for group in inner.param_groups:
            group["params"] = [self._twins[parameter] for parameter in group["params"]]
        self._inner, self._place, self._files, self._state_in_files = inner, place, files, state_in_files
        self._parts = _parts(parameters, part_mib * 2**20)
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; the gradients are gone afterwards."""
        assert closure is None
        for outer, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            own.update({name: value for name, value in outer.items() if name != "params"})
        gradients = {parameter: parameter.grad for parameter in self._twins}
        for parameter in self._twins:
            parameter.grad = None
        for part in self._parts:
            self._update({parameter: gradients.pop(parameter) for parameter in part})

    def _update(self, gradients: dict[nn.Parameter, Tensor | None]) -> None:
        for parameter, gradient in gradients.items():
            twin = self._twins[parameter]
            if twin is not parameter:
                _local(twin).copy_(_local(parameter))
            twin.grad = None if gradient is None else gradient.to(self._place)
        self._inner.step()
        for parameter in gradients:
            twin = self._twins[parameter]
            twin.grad = None
            if twin is not parameter:
                _local(parameter).copy_(_local(twin))
            self._keep(parameter, self._inner.state[twin])

    def _keep(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        self.state[parameter] = state
        if self._files is None:
            return
        tensors = [value for value in state.values() if isinstance(value, DTensor)]
        for value in tensors if self._state_in_files else []:
            if not self._files.holds(_local(value)):
                set_local(value, self._files.take(_local(value)))
        for used in [parameter, *tensors]:
            self._files.drop(_local(used))


def _copied(parameter: nn.Parameter, place: torch.device) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(place))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parts(parameters: list[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = _local(parameter).nbytes  # none, where other ranks have all rows
        if not parts or filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(parameter)
        filled += size
    return parts
