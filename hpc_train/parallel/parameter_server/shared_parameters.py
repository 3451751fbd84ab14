"""A share of the model's parameters in the memory of its servers, read and written by one-sided communication.

A share is whole parameters with their gradients and optimizer state, as views of one buffer that can be sent as it is.
The buffer lies in an MPI window on each server of the share: the first one updates it, the others hold copies.
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


class ParameterShare:
    """The parameters that one server holds, their optimizer and its state.

    The parameters come first in the buffer, one after the other without gaps, so that a flat gradient fits them.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], make_optimizer: OptimizerFactory) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [nn.Parameter(p.detach().clone()) for _, p in parameters]
        self.optimizer = make_optimizer(nn.ParameterList(self.parameters))
        initialise_optimizer_state(self.optimizer)
        assert len({p.dtype for p in self.parameters}) <= 1, "parameters of one share have one dtype"
        self.parameter_bytes = sum(_count_bytes(p) for p in self.parameters)
        self.bytes = _align_size(self.parameter_bytes) + sum(
            _align_size(_count_bytes(value)) for _, _, value in self._state()
        )

    def bind(self, buffer: Tensor, keep: bool) -> None:
        """Make every tensor a view of `buffer` (bytes), which keeps what it holds or takes their values."""
        offset = 0
        for parameter in self.parameters:
            parameter.data = _place_in_buffer(parameter.data, buffer, offset, keep)
            offset += _count_bytes(parameter)
        offset = _align_size(offset)
        for parameter, key, value in self._state():
            self.optimizer.state[parameter][key] = _place_in_buffer(value, buffer, offset, keep)
            offset += _align_size(_count_bytes(value))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Everything to save, by the names of interfaces.TensorShard."""
        yield from zip(self.names, self.parameters, strict=True)
        names = dict(zip(self.parameters, self.names, strict=True))
        for parameter, key, value in self._state():
            yield f"optim.{key}.{names[parameter]}", value

    def step(self, gradient: Tensor, lr: float) -> None:
        """Update the share. gradient: flat, of all parameters in order."""
        parts = torch.split(gradient, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _state(self) -> list[tuple[nn.Parameter, str, Tensor]]:
        return [(p, key, value) for p in self.parameters for key, value in self.optimizer.state[p].items()]


def deal_parameters(parameters: Sequence[tuple[str, nn.Parameter]], count: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Whole parameters dealt to `count` servers, the largest first, each to the one that has least."""
    dealt: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(count)]
    loads = [0] * count
    for name, parameter in sorted(parameters, key=lambda item: -item[1].numel()):
        least = loads.index(min(loads))
        dealt[least].append((name, parameter))
        loads[least] += parameter.numel()
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
    """The ranks that hold share `index` of `servers`: the one that updates it, then those with copies."""
    first = spread_evenly(index, servers, ranks)
    return [(first + spread_evenly(copy, replicas, ranks)) % ranks for copy in range(replicas)]


class ShareWindow:
    """Memory of one share on each of its hosts, and of the gradient that is added up on the first of them."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        make_optimizer: OptimizerFactory,
        ranks: MpiRanks,
        held_by: list[int],
    ) -> None:
        """A collective: every rank calls it, with the same parameters."""
        from mpi4py import MPI

        self._mpi, self._ranks, self.hosts = MPI, ranks, held_by
        self.parameters = [parameter for _, parameter in parameters]
        me, like = ranks.every.rank, self.parameters[0]
        share = ParameterShare(parameters, make_optimizer)
        self.bytes, self._parameter_bytes = share.bytes, share.parameter_bytes
        self._window = MPI.Win.Allocate(self.bytes if me in held_by else 0, 1, comm=ranks.every)
        self._gradients = MPI.Win.Allocate(self._parameter_bytes if me == held_by[0] else 0, 1, comm=ranks.every)
        self._type = MPI.DOUBLE if like.dtype == torch.float64 else MPI.FLOAT
        self._flat = torch.empty(self._parameter_bytes // like.element_size(), dtype=like.dtype)
        self.share: ParameterShare | None = None
        """On the hosts, in the window's own memory."""
        if me in held_by:
            share.bind(_view_window(self._window), keep=False)
            self.share = share
        if me == held_by[0]:
            _view_window(self._gradients).zero_()

    @property
    def nearest(self) -> int:
        """The host to read from: on this rank's node if there is one there; else the ranks take turns."""
        nodes, me = self._ranks.nodes, self._ranks.every.rank
        near = [host for host in self.hosts if nodes[host] == nodes[me]] or self.hosts
        return me if me in near else near[me % len(near)]

    def pull(self) -> None:
        """Read the parameters from the nearest host into the model; the leader of a group for all of it."""
        if self._ranks.leads:
            with self._held(self._window, self.nearest, self._mpi.LOCK_SHARED):
                self._window.Get([self._flat.numpy(), self._type], self.nearest, (0, self._flat.numel(), self._type))
        if self._ranks.group.size > 1:
            with self._ranks.calling:
                self._ranks.group.Bcast(self._flat.numpy(), 0)
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self._split(self._flat), strict=True):
                parameter.copy_(part.view_as(parameter))

    def gradient(self) -> Tensor:
        """The model's gradient of this share, flat, the mean over the ranks of a group; only on its leader."""
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
        torch.cat(flat, out=self._flat)
        if (group := self._ranks.group).size > 1:
            with self._ranks.calling:
                group.Allreduce(self._mpi.IN_PLACE, self._flat.numpy())
            self._flat /= group.size
        return self._flat

    def push(self, gradient: Tensor) -> None:
        """Add a gradient to what others have pushed."""
        target = (0, gradient.numel(), self._type)
        with self._held(self._gradients, self.hosts[0], self._mpi.LOCK_SHARED):
            self._gradients.Accumulate([gradient.numpy(), self._type], self.hosts[0], target, self._mpi.SUM)

    def pushed(self) -> Tensor | None:
        """The sum of what was pushed, in the window's own memory; None but on the host that updates the share."""
        if self._ranks.every.rank != self.hosts[0]:
            return None
        return _view_window(self._gradients).view(self._flat.dtype)

    def apply(self, gradient: Tensor, lr: float) -> None:
        """On the host that updates the share: one step with this gradient; then bring the copies up to date."""
        assert self.share is not None
        with self._held(self._window, self.hosts[0], self._mpi.LOCK_EXCLUSIVE):
            self.share.step(gradient, lr)
            self._copy_to_replicas(_view_window(self._window))

    def update_from_afar(self, share: ParameterShare, scratch: Tensor, gradient: Tensor, lr: float) -> None:
        """Update a share on another rank: fetch it into `scratch`, step, put it back."""
        share.bind(scratch[: self.bytes], keep=True)
        mine = scratch[: self.bytes]
        with self._held(self._window, self.hosts[0], self._mpi.LOCK_EXCLUSIVE):
            self._window.Get([mine.numpy(), self._mpi.BYTE], self.hosts[0], (0, self.bytes, self._mpi.BYTE))
            self._window.Flush(self.hosts[0])
            share.step(gradient, lr)
            self._window.Put([mine.numpy(), self._mpi.BYTE], self.hosts[0], (0, self.bytes, self._mpi.BYTE))
            self._window.Flush(self.hosts[0])
            self._copy_to_replicas(mine)

    def _copy_to_replicas(self, data: Tensor) -> None:
        """While the first host is locked, so that copies never go back to an older version."""
        for host in self.hosts[1:]:
            self._window.Lock(host, self._mpi.LOCK_EXCLUSIVE)
            self._window.Put([data.numpy(), self._mpi.BYTE], host, (0, self.bytes, self._mpi.BYTE))
            self._window.Unlock(host)

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return torch.split(flat, [p.numel() for p in self.parameters])

    @contextmanager
    def _held(self, window: MPI.Win, rank: int, how: int) -> Iterator[None]:
        with self._ranks.calling:
            window.Lock(rank, how)
            try:
                yield
            finally:
                window.Unlock(rank)


def _view_window(window: Any) -> Tensor:
    return torch.frombuffer(window.tomemory(), dtype=torch.uint8)


def list_server_shards(model: nn.Module, windows: list[ShareWindow], world: World) -> Iterator[TensorShard]:
    """Each share on the ranks that hold it; frozen parameters and persistent buffers on every rank."""
    for window in windows:
        if window.share is not None:
            for name, tensor in window.share.named():
                yield _make_whole_shard(name, tensor.detach(), window.hosts.index(world.rank))
    served = [parameter for window in windows for parameter in window.parameters]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is parameter for parameter in served):
            yield _make_whole_shard(name, tensor.detach(), world.rank)


def _make_whole_shard(name: str, tensor: Tensor, replica: int) -> TensorShard:
    return TensorShard(name, tuple(tensor.shape), tensor.dtype, (0,) * tensor.ndim, tensor, replica)
