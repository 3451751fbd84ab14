"""torch.distributed: gloo where the ranks are on CPUs, NCCL where they are on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train import compat
from hpc_train.api import World
from hpc_train.bench.collectives.backends import Call
from hpc_train.bench.collectives.definitions import Operation
from hpc_train.bench.collectives.groups import WORLD, Group
from hpc_train.bench.collectives.own import Wire


class TorchBackend:
    """See backends.Backend. The groups are those that training uses."""

    in_place = frozenset({"all_reduce", "broadcast", "reduce"})

    def __init__(self, world: World) -> None:
        self._world, self.device = world, world.device
        self.name = "nccl" if world.device.type == "cuda" else "gloo"

    def connect(self, group: Group) -> TorchConnection:
        """See backends.Backend."""
        everyone = dist.group.WORLD
        assert everyone is not None
        chosen = everyone if group.axis == WORLD else self._world.mesh.get_group(group.axis)
        # NCCL wants all ranks of a group in its first call, which a message between two of them is not.
        dist.all_reduce(torch.zeros(1, device=self.device), group=chosen)
        return TorchConnection(chosen)

    def finish(self) -> None:
        """See backends.Backend."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class TorchConnection:
    """See backends.Connection."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def wire(self) -> Wire:
        """See backends.Connection."""
        return _TorchWire(self._group)

    def call(self, operation: Operation, sent: Tensor, received: Tensor) -> Call:
        """See backends.Connection."""
        group, ranks = self._group, self._group.size()
        wire = _TorchWire(group)
        calls = {
            "all_reduce": lambda: dist.all_reduce(received, group=group),
            "all_gather": lambda: compat.all_gather(received.view(ranks, -1), sent, group),
            "reduce_scatter": lambda: compat.reduce_scatter(received, sent.view(ranks, -1), group),
            "broadcast": lambda: dist.broadcast(received, group=group, group_src=0),
            "reduce": lambda: dist.reduce(received, group=group, group_dst=0),
            "all_to_all": lambda: dist.all_to_all_single(received, sent, group=group),
            "send_recv": lambda: wire.exchange(sent, (wire.index + 1) % ranks, received, (wire.index - 1) % ranks),
        }
        call: Call = calls[operation.name]
        return call


class _TorchWire:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self.index, self._group = group.size(), group.rank(), group

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
        messages = []
        if received is not None and received.numel():
            messages.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=source))
        if sent is not None and sent.numel():
            messages.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=to))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
