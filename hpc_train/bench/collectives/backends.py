"""One interface to the communication libraries: torch (gloo on the CPU, NCCL on CUDA) and MPI (mpi4py).

Our own ring and binomial-tree all-reduce run over any backend's point-to-point messages, to compare the algorithms
where a library does not let a program choose. They do not pipeline segments, so a library's own can be faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train._torch.process_groups import all_gather, reduce_scatter
from hpc_train.bench.collectives.definitions import CollectiveOperation
from hpc_train.interfaces import World
from hpc_train.runtime.mpi import require_mpi
from hpc_train.traffic.rank_groups import WORLD_AXIS, RankGroup

if TYPE_CHECKING:
    from mpi4py import MPI

CollectiveCall = Callable[[], None]
"""Runs one collective on fixed buffers; returns when this rank may use them or, on a GPU, when it is queued."""


class Backend(Protocol):
    """A communication library."""

    name: str
    """gloo, nccl or mpi."""
    device: torch.device
    """Device of its buffers."""
    in_place: frozenset[str]
    """Operations that it has only in place: the result overwrites the input."""

    def connect(self, group: RankGroup) -> Connection:
        """Connect the ranks of a group. A collective of all ranks of the job, with groups in the same order."""

    def finish(self) -> None:
        """Wait until all queued operations are done."""


class Connection(Protocol):
    """A backend's connection between the ranks of one group."""

    def call(self, operation: CollectiveOperation, sent: Tensor, received: Tensor) -> CollectiveCall:
        """Return a call of the library's own collective. In place, `received` has the input and `sent` is unused."""

    def wire(self) -> PointToPoint:
        """Return point-to-point messages between the ranks of the group."""


class PointToPoint(Protocol):
    """Messages between the ranks of one group."""

    size: int
    index: int
    """Index of this rank in the group."""

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
        """Send and receive at the same time; returns when both are done. A buffer of None skips that direction."""


def ring_all_reduce(wire: PointToPoint, buffer: Tensor, scratch: Tensor) -> None:
    """Sum `buffer` (n,) over the ranks in place: reduce-scatter, then all-gather, around a ring.

    scratch: at least ceil(n / ranks) elements. 2 (ranks - 1) steps of n / ranks elements.
    Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 4.
    """
    ranks, rank = wire.size, wire.index
    parts, to, source = buffer.tensor_split(ranks), (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        # In each step a rank passes on the part that it has just
        # added to; after ranks - 1 steps it has one complete sum.
        chunk = parts[(rank - step - 1) % ranks]
        incoming = scratch[: chunk.numel()]
        wire.exchange(parts[(rank - step) % ranks], to, incoming, source)
        chunk += incoming
    for step in range(ranks - 1):
        wire.exchange(parts[(rank + 1 - step) % ranks], to, parts[(rank - step) % ranks], source)


def tree_all_reduce(wire: PointToPoint, buffer: Tensor, scratch: Tensor) -> None:
    """Sum `buffer` (n,) over the ranks in place: a binomial tree up to the first rank, then down again.

    scratch: at least n elements. 2 ceil(log2 ranks) steps of n elements.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    ranks, rank = wire.size, wire.index
    strides = [1 << bit for bit in range((ranks - 1).bit_length())]
    for stride in strides:
        if rank % (2 * stride) == stride:
            wire.exchange(buffer, rank - stride, None, rank)
        elif rank % (2 * stride) == 0 and rank + stride < ranks:
            incoming = scratch[: buffer.numel()]
            wire.exchange(None, rank, incoming, rank + stride)
            buffer += incoming
    for stride in reversed(strides):
        if rank % (2 * stride) == stride:
            wire.exchange(None, rank, buffer, rank - stride)
        elif rank % (2 * stride) == 0 and rank + stride < ranks:
            wire.exchange(buffer, rank + stride, None, rank)


OWN_ALGORITHMS = {"ring": ring_all_reduce, "tree": tree_all_reduce}


class TorchBackend:
    """Backend of torch.distributed, with the process groups of training."""

    in_place = frozenset({"all_reduce", "broadcast", "reduce"})

    def __init__(self, world: World) -> None:
        self._world, self.device = world, world.device
        self.name = "nccl" if world.device.type == "cuda" else "gloo"

    def connect(self, group: RankGroup) -> TorchConnection:
        """See backends.Backend."""
        all_ranks = dist.group.WORLD
        assert all_ranks is not None
        chosen = all_ranks if group.axis == WORLD_AXIS else self._world.mesh.get_group(group.axis)
        # NCCL's first call in a group must include all its ranks; a message between two of them does not.
        dist.all_reduce(torch.zeros(1, device=self.device), group=chosen)
        return TorchConnection(chosen)

    def finish(self) -> None:
        """See backends.Backend."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class TorchConnection:
    """Connection through a torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def wire(self) -> PointToPoint:
        """See backends.Connection."""
        return _TorchWire(self._group)

    def call(self, operation: CollectiveOperation, sent: Tensor, received: Tensor) -> CollectiveCall:
        """See backends.Connection."""
        group, ranks = self._group, self._group.size()
        wire = _TorchWire(group)
        calls = {
            "all_reduce": lambda: dist.all_reduce(received, group=group),
            "all_gather": lambda: all_gather(received.view(ranks, -1), sent, group),
            "reduce_scatter": lambda: reduce_scatter(received, sent.view(ranks, -1), group),
            "broadcast": lambda: dist.broadcast(received, group=group, group_src=0),
            "reduce": lambda: dist.reduce(received, group=group, group_dst=0),
            "all_to_all": lambda: dist.all_to_all_single(received, sent, group=group),
            "send_recv": lambda: wire.exchange(sent, (wire.index + 1) % ranks, received, (wire.index - 1) % ranks),
        }
        call: CollectiveCall = calls[operation.name]
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


_STARTED_BY = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "PMIX_RANK")
"""Set by mpirun of Open MPI and MPICH, and by srun --mpi=pmix. With --mpi=none or pmi2 some libraries abort."""


def is_started_by_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return whether MPI can be initialised here safely, as far as the environment shows."""
    env = os.environ if env is None else env
    return any(name in env for name in _STARTED_BY)


class MpiBackend:
    """Backend of MPI, on buffers in host memory."""

    name = "mpi"
    device = torch.device("cpu")
    in_place = frozenset({"broadcast"})

    def __init__(self, world: World) -> None:
        """Raises UserError if MPI did not start the ranks of this job."""
        self._everyone: MPI.Intracomm = require_mpi("--backend mpi", world.size).COMM_WORLD

    def connect(self, group: RankGroup) -> MpiConnection:
        """See backends.Backend."""
        return MpiConnection(self._everyone.Split(color=group.ranks[0], key=group.index))

    def finish(self) -> None:
        """Do nothing, since the MPI calls block."""


class MpiConnection:
    """Connection through an MPI communicator."""

    def __init__(self, ranks: MPI.Comm) -> None:
        self._ranks = ranks

    def wire(self) -> PointToPoint:
        """See backends.Connection."""
        return _MpiWire(self._ranks)

    def call(self, operation: CollectiveOperation, sent: Tensor, received: Tensor) -> CollectiveCall:
        """See backends.Connection."""
        ranks, give, take = self._ranks, sent.numpy(), received.numpy()
        to, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        calls = {
            "all_reduce": lambda: ranks.Allreduce(give, take),
            "all_gather": lambda: ranks.Allgather(give, take),
            "reduce_scatter": lambda: ranks.Reduce_scatter_block(give, take),
            "broadcast": lambda: ranks.Bcast(take, root=0),
            "reduce": lambda: ranks.Reduce(give, take, root=0),
            "all_to_all": lambda: ranks.Alltoall(give, take),
            "send_recv": lambda: ranks.Sendrecv(give, to, recvbuf=take, source=source),
        }
        call: CollectiveCall = calls[operation.name]
        return call


class _MpiWire:
    def __init__(self, ranks: MPI.Comm) -> None:
        self.size, self.index, self._ranks = ranks.size, ranks.rank, ranks

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
        requests = []
        if received is not None:
            # The receive is posted before the send: two ranks that send
            # large messages first could wait for one another.
            requests.append(self._ranks.Irecv(received.numpy(), source))
        if sent is not None:
            requests.append(self._ranks.Isend(sent.numpy(), to))
        for request in requests:
            request.Wait()
