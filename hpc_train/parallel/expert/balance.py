"""Loads of experts over all ranks: the statistics of a step, the scale of the auxiliary loss, and the bias update.

Routers record the loads of their own rank in backward. One sum over all ranks a step adds up those of all layers, so
that every rank has the loads of the global batch and moves the biases by them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.interfaces import ExpertLoads, World
from hpc_train.models.experts import Router
from hpc_train.parallel.mesh_axes import get_axis_degree


def list_routers(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Return the number of experts of each router of a model, or of all its stages, by name."""
    modules = [entry for part in parts for entry in part.named_modules()]
    return {name: module.config.count for name, module in modules if isinstance(module, Router)}


class ExpertBalance:
    """Tells the routers of this rank's parts about each step, and adds up what they have seen in it."""

    def __init__(self, parts: Sequence[nn.Module], experts: Mapping[str, int], world: World) -> None:
        """experts: list_routers of the whole model, the same on every rank."""
        routers = {
            name: module for part in parts for name, module in part.named_modules() if isinstance(module, Router)
        }
        self._routers = {list(experts).index(name): router for name, router in routers.items()}
        self._counts, self._world = list(experts.values()), world
        self._loads: Tensor | None = None

    def begin_step(self, get_loss_scale: Callable[[], float]) -> None:
        """Begin a step. get_loss_scale: the factor between the sum of losses and what backward starts from."""
        self._loads = None
        for router in self._routers.values():
            router.balance.reset()
            router.balance.loss_scale = get_loss_scale

    def end_step(self) -> ExpertLoads:
        """Add up over all ranks what the routers have seen. Every rank calls this after the last backward."""
        # One row for each layer: the load of each expert, then the dropped tokens and the auxiliary loss.
        sums = torch.zeros(len(self._counts), max(self._counts) + 2, dtype=torch.float64, device=self._world.device)
        for layer, router in self._routers.items():
            balance = router.balance
            if balance.loads is not None and balance.loss is not None:
                sums[layer, : len(balance.loads) - 1] = balance.loads[:-1]
                sums[layer, -2], sums[layer, -1] = balance.loads[-1], balance.loss * balance.copies
        if self._world.size > 1:
            dist.all_reduce(sums)
        sums /= get_axis_degree(self._world, "tp")  # tp ranks have all routed the same tokens
        self._loads = sums[:, :-2]
        return ExpertLoads(self._loads, sums[:, -2].sum(), sums[:, -1].sum())

    def move_biases(self) -> None:
        """Move the bias of every router that has one by the loads of the step that ended last."""
        assert self._loads is not None, "update before forward_backward"
        for layer, router in self._routers.items():
            if router.config.balance_bias:
                router.move_bias(self._loads[layer, : router.config.count])
