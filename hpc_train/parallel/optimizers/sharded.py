"""torch's AdamW and SGD, stepping over what this rank holds of each parameter instead of over DTensors.

Their updates are elementwise, so that of a shard needs nothing from other ranks. torch can step over DTensors, but at
the first step it plans how each list of tensors is split (0.1 s for 40 parameters on one axis, more on several), and in
every step it unwraps and wraps all of them, which takes four times as long as the update of small parameters.

Numbers, groups and state are torch's; the state of a DTensor is a DTensor, for checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from hpc_train.parallel.optimizer_step import get_local


class ShardedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW for parameters some of which are split over ranks."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # torch's step fills these lists (parameters, gradients, moments, steps) here, and passes them to its kernel.
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(get_local, tensors)
        return has_complex


class ShardedSGD(torch.optim.SGD):
    """torch.optim.SGD for parameters some of which are split over ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            # torch's first momentum is the gradient itself: what zeros become, as dampening is never set here.
            momenta = [self._get_momentum(parameter) for parameter in parameters] if group["momentum"] else []
            sgd(
                list(map(get_local, parameters)),
                [get_local(parameter.grad) for parameter in parameters],
                list(map(get_local, momenta)),
                has_sparse_grad=False,
                foreach=group["foreach"],
                fused=group["fused"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )

    def _get_momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer
