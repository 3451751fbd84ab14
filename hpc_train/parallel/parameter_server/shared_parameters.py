"""Store a share of the model's parameters on its servers, read and written by one-sided MPI communication.

A share is a set of whole parameters with their optimizer state, as views of one contiguous buffer, which is sent
without packing. Each server (host) of the share has the buffer in an MPI window: the first host updates it, the others
have replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpc_train.interfaces import TensorShard, World
from hpc_train.parallel.optimizer_step import OptimizerFactory, initialise_optimizer_state
from hpc_train.parallel.parameter_server.mpi_ranks import MpiRanks, spread_evenly

if TYPE_CHECKING:
    from mpi4py import MPI

_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes in the buffer, as torch's own on the CPU do."""


class ParameterShare:
    """The parameters of one share, their optimizer and its state.

    The parameters come first in the buffer, without gaps, so that a flat gradient has their layout.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], make_optimizer: OptimizerFactory) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [nn.Parameter(p.detach().clone()) for _, p in parameters]
        self.optimizer = make_optimizer(nn.ParameterList(self.parameters))
        initialise_optimizer_state(self.optimizer)
        assert len({p.dtype for p in self.parameters}) <= 1, "parameters of one share have one dtype"
        self.parameter_bytes = sum(_count_bytes(p) for p in self.parameters)
        self.bytes = _align_size(self.parameter_bytes) + sum(
            _align_size(_count_bytes(value)) for _, _, value in self._list_state()
        )

    def bind(self, buffer: Tensor, keep: bool) -> None:
        """Make every tensor a view of `buffer` (bytes). keep: use its values; else copy the tensors into it."""
        offset = 0
        for parameter in self.parameters:
            parameter.data = _place_in_buffer(parameter.data, buffer, offset, keep)
            offset += _count_bytes(parameter)
        offset = _align_size(offset)
        for parameter, key, value in self._list_state():
            self.optimizer.state[parameter][key] = _place_in_buffer(value, buffer, offset, keep)
            offset += _align_size(_count_bytes(value))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of everything to save, with the names of interfaces.TensorShard."""
        yield from zip(self.names, self.parameters, strict=True)
        names = dict(zip(self.parameters, self.names, strict=True))
        for parameter, key, value in self._list_state():
            yield f"optim.{key}.{names[parameter]}", value

    def step(self, gradient: Tensor, lr: float) -> None:
        """Step the optimizer. gradient: flat, of all parameters in order."""
        parts = torch.split(gradient, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _list_state(self) -> list[tuple[nn.Parameter, str, Tensor]]:
        return [(p, key, value) for p in self.parameters for key, value in self.optimizer.state[p].items()]


def assign_parameters(
    parameters: Sequence[tuple[str, nn.Parameter]], count: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """Distribute whole parameters over `count` servers, largest first, each to the server with the fewest elements."""
    dealt: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(count)]
    loads = [0] * count
    # So they are close to even, and the same on every rank without communication.
    for name, parameter in sorted(parameters, key=lambda item: -item[1].numel()):
        lightest = loads.index(min(loads))
        dealt[lightest].append((name, parameter))
        loads[lightest] += parameter.numel()
    return dealt


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _align_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _place_in_buffer(tensor: Tensor, buffer: Tensor, offset: int, keep: bool) -> Tensor:
    view = buffer[offset : offset + _count_bytes(tensor)].view(tensor.dtype).view(tensor.shape)
    if not keep:
        view.copy_(tensor)
    return view


def find_hosts(index: int, servers: int, replicas: int, ranks: int) -> list[int]:
    """Return the ranks that host share `index` of `servers`: first the one that updates it, then the replicas."""
    first = spread_evenly(index, servers, ranks)
    return [(first + spread_evenly(copy, replicas, ranks)) % ranks for copy in range(replicas)]


class ShareWindow:
    """MPI windows of one share: its buffer on each of its hosts, and the sum of pushed gradients on the first."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        make_optimizer: OptimizerFactory,
        ranks: MpiRanks,
        hosts: list[int],
    ) -> None:
        """A collective. parameters: of the share, the same on every rank. hosts: see find_hosts."""
        from mpi4py import MPI

        self._mpi, self._ranks, self.hosts = MPI, ranks, hosts
        self.parameters = [parameter for _, parameter in parameters]
        rank, like = ranks.comm.rank, self.parameters[0]
        share = ParameterShare(parameters, make_optimizer)
        self.bytes, self._parameter_bytes = share.bytes, share.parameter_bytes
        # Creating a window is a collective: ranks that host nothing take part with no memory.
        self._window = MPI.Win.Allocate(self.bytes if rank in hosts else 0, 1, comm=ranks.comm)
        self._gradients = MPI.Win.Allocate(self._parameter_bytes if rank == hosts[0] else 0, 1, comm=ranks.comm)
        self._type = MPI.DOUBLE if like.dtype == torch.float64 else MPI.FLOAT
        self._flat = torch.empty(self._parameter_bytes // like.element_size(), dtype=like.dtype)
        self.share: ParameterShare | None = None
        """The share in the window's memory; None on ranks that do not host it."""
        if rank in hosts:
            share.bind(_view_window(self._window), keep=False)
            self.share = share
        if rank == hosts[0]:
            _view_window(self._gradients).zero_()

    @property
    def nearest(self) -> int:
        """The host to read from: one on this rank's node if possible, else ranks are spread over the hosts."""
        nodes, rank = self._ranks.nodes, self._ranks.comm.rank
        # Reading within a node goes through shared memory, not the network.
        same_node = [host for host in self.hosts if nodes[host] == nodes[rank]] or self.hosts
        return rank if rank in same_node else same_node[rank % len(same_node)]

    def pull(self) -> None:
        """Read the parameters from the nearest host into the model; the leader of a group reads for the group."""
        if self._ranks.leads:
            with self._locked(self._window, self.nearest, self._mpi.LOCK_SHARED):
                self._window.Get([self._flat.numpy(), self._type], self.nearest, (0, self._flat.numel(), self._type))
        if self._ranks.group.size > 1:
            with self._ranks.lock:
                self._ranks.group.Bcast(self._flat.numpy(), 0)
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self._split(self._flat), strict=True):
                parameter.copy_(part.view_as(parameter))

    def reduce_gradient(self) -> Tensor:
        """Return the model's gradient of this share, flat and averaged over the ranks of the group."""
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
        torch.cat(flat, out=self._flat)
        if (group := self._ranks.group).size > 1:
            with self._ranks.lock:
                group.Allreduce(self._mpi.IN_PLACE, self._flat.numpy())
            self._flat /= group.size
        return self._flat

    def push(self, gradient: Tensor) -> None:
        """Add a gradient to the sum on the first host."""
        target = (0, gradient.numel(), self._type)
        with self._locked(self._gradients, self.hosts[0], self._mpi.LOCK_SHARED):
            self._gradients.Accumulate([gradient.numpy(), self._type], self.hosts[0], target, self._mpi.SUM)

    def view_pushed(self) -> Tensor | None:
        """Return the sum of pushed gradients, a view of the window; None except on the first host."""
        if self._ranks.comm.rank != self.hosts[0]:
            return None
        return _view_window(self._gradients).view(self._flat.dtype)

    def apply(self, gradient: Tensor, lr: float) -> None:
        """Step the share with this gradient and update the replicas; only on the first host."""
        assert self.share is not None
        with self._locked(self._window, self.hosts[0], self._mpi.LOCK_EXCLUSIVE):
            self.share.step(gradient, lr)
            self._copy_to_replicas(_view_window(self._window))

    def update_remotely(self, share: ParameterShare, scratch: Tensor, gradient: Tensor, lr: float) -> None:
        """Update the share from any rank: fetch its buffer into `scratch`, step, write it back and to the replicas."""
        share.bind(scratch[: self.bytes], keep=True)
        local_copy = scratch[: self.bytes]
        with self._locked(self._window, self.hosts[0], self._mpi.LOCK_EXCLUSIVE):
            self._window.Get([local_copy.numpy(), self._mpi.BYTE], self.hosts[0], (0, self.bytes, self._mpi.BYTE))
            self._window.Flush(self.hosts[0])
            share.step(gradient, lr)
            self._window.Put([local_copy.numpy(), self._mpi.BYTE], self.hosts[0], (0, self.bytes, self._mpi.BYTE))
            self._window.Flush(self.hosts[0])
            self._copy_to_replicas(local_copy)

    def _copy_to_replicas(self, data: Tensor) -> None:
        """Write the buffer to the replicas; the first host must be locked, so that they never get an older version."""
        for host in self.hosts[1:]:
            # A reader may hold a shared lock of this replica: it gets the old version whole or the new one. Not
            # _locked, because the caller holds the lock around MPI calls already.
            self._window.Lock(host, self._mpi.LOCK_EXCLUSIVE)
            self._window.Put([data.numpy(), self._mpi.BYTE], host, (0, self.bytes, self._mpi.BYTE))
            self._window.Unlock(host)

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return torch.split(flat, [p.numel() for p in self.parameters])

    @contextmanager
    def _locked(self, window: MPI.Win, rank: int, lock_type: int) -> Iterator[None]:
        with self._ranks.lock:
            window.Lock(rank, lock_type)
            try:
                yield
            finally:
                window.Unlock(rank)


def _view_window(window: Any) -> Tensor:
    return torch.frombuffer(window.tomemory(), dtype=torch.uint8)


def list_server_shards(model: nn.Module, windows: list[ShareWindow], world: World) -> Iterator[TensorShard]:
    """Yield each share on its hosts, and frozen parameters and persistent buffers on every rank."""
    for window in windows:
        if window.share is not None:
            for name, tensor in window.share.named_tensors():
                yield _make_whole_shard(name, tensor.detach(), window.hosts.index(world.rank))
    served = [parameter for window in windows for parameter in window.parameters]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is parameter for parameter in served):
            yield _make_whole_shard(name, tensor.detach(), world.rank)


def _make_whole_shard(name: str, tensor: Tensor, replica: int) -> TensorShard:
    return TensorShard(name, tuple(tensor.shape), tensor.dtype, (0,) * tensor.ndim, tensor, replica)
