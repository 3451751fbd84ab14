"""Who sends which keys and values to whom in ring attention, and which blocks of the scores a rank computes.

Keys go all round the ring; under a window each rank sends its own directly to those that see some of them. The
balanced causal order gives every rank a chunk from the beginning of the sequence and one from its end, so that all do
the same work in every round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.models.attention.plain_attention import ScoreRule
from hpc_train.traffic.ring_blocks import RingLayout


@dataclass
class PendingReceive:
    """A tensor that is being received, and the one that is being sent, which must stay alive until then."""

    tensor: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait until the tensor is received; returns it."""
        for work in self.works:
            work.wait()
        return self.tensor


class KeyValueRing:
    """The ranks of a process group as a ring."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.name = group.group_name
        self._group = group
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def pass_on(self, tensor: Tensor) -> PendingReceive:
        """Start sending a contiguous tensor to the next rank and receiving one like it from the previous rank."""
        incoming = torch.empty_like(tensor)
        # One batch: NCCL runs the messages between two ranks one after another, and in a ring of two both would begin
        # with their send and wait for a receive that never starts.
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self._group),
            dist.P2POp(dist.irecv, incoming, self._previous, self._group),
        ]
        return PendingReceive(incoming, tensor, dist.batch_isend_irecv(operations))

    def circulate(self, local_kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its tensor) for every rank, this one first, while the next tensor is being received."""
        current = local_kv
        for step in range(self.size):
            pending = self.pass_on(current) if step < self.size - 1 else None
            yield (self.rank - step) % self.size, current
            if pending is not None:
                current = pending.wait()

    def exchange(self, shift: int, outgoing: Tensor | None, like: Tensor | None) -> PendingReceive | None:
        """Start sending `outgoing` to the rank that is `shift` further, and receiving a tensor from the one before.

        None sends nothing. like: of the shape that is received; None: nothing comes.
        """
        operations = []
        if outgoing is not None:
            operations.append(dist.P2POp(dist.isend, outgoing, self._find_rank(shift), self._group))
        if like is None:
            sent = dist.batch_isend_irecv(operations) if operations else []
            return None if outgoing is None else PendingReceive(outgoing, outgoing, sent)
        incoming = torch.empty_like(like)
        operations.append(dist.P2POp(dist.irecv, incoming, self._find_rank(-shift), self._group))
        return PendingReceive(incoming, incoming if outgoing is None else outgoing, dist.batch_isend_irecv(operations))

    def _find_rank(self, shift: int) -> int:
        return dist.get_global_rank(self._group, (self.rank + shift) % self.size)


@dataclass(frozen=True)
class VisibleBlock:
    """The part of a round that a causal mask leaves: which queries of this rank see which keys of the other."""

    queries: slice
    keys: slice
    causal: bool
    """Query i sees keys 0 ... i of the block; else all."""
    back: int | None = None
    """With a window or a soft-cap: positions from the first key to the first query. None: the block knows neither."""


def find_visible_block(rank: int, source: int, length: int, *, causal: bool, balanced: bool) -> VisibleBlock | None:
    """Return what the queries of `rank` see of the keys of `source`, `length` positions each; None if nothing.

    In balanced order, if source < rank, source's first chunk is before both chunks of rank and its second one after
    both. Else both are before rank's second chunk and after its first. So any two ranks compute half of the products.
    """
    everything = slice(0, length)
    if not causal or source == rank:
        return VisibleBlock(everything, everything, causal)
    if not balanced:
        return VisibleBlock(everything, everything, False) if source < rank else None
    half = length // 2
    if source < rank:
        return VisibleBlock(everything, slice(0, half), False)
    return VisibleBlock(slice(half, length), everything, False)


def list_ruled_blocks(layout: RingLayout, rank: int, source: int, rule: ScoreRule) -> list[VisibleBlock]:
    """List the blocks of causal attention under a window or a soft-cap; those of a chunk and itself come first."""
    size, blocks = layout.chunk, []
    for pair in sorted(layout.list_pairs(rank, source, rule.window), key=lambda pair: pair.back):
        queries, keys = (slice(index * size, (index + 1) * size) for index in (pair.query, pair.key))
        is_cut = rule.softcap is not None or (rule.window is not None and pair.back + size > rule.window)
        blocks.append(VisibleBlock(queries, keys, pair.back == 0, pair.back if is_cut else None))
    return blocks


@dataclass(frozen=True)
class RingSchedule:
    """Who sends which keys to whom, and which blocks a rank computes of those it receives."""

    ring: KeyValueRing
    rule: ScoreRule
    balanced: bool

    def list_blocks(self, source: int, length: int) -> list[VisibleBlock]:
        """List what this rank's queries see of the keys of `source`, `length` positions each."""
        rule = self.rule
        if rule.window is None and rule.softcap is None:
            block = find_visible_block(self.ring.rank, source, length, causal=rule.causal, balanced=self.balanced)
            return [] if block is None else [block]
        if not rule.causal:
            everything = slice(0, length)
            return [VisibleBlock(everything, everything, False, 0)]
        return list_ruled_blocks(self._make_layout(length), self.ring.rank, source, rule)

    def _make_layout(self, length: int) -> RingLayout:
        return RingLayout(self.ring.size, length, self.balanced)

    def list_shifts(self, length: int) -> tuple[int, ...] | None:
        """List the distances over which ranks exchange keys under a window; None: all keys go round the ring."""
        window = self.rule.window
        return None if window is None else self._make_layout(length).list_shifts(window)

    def circulate(self, local_kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its keys and values) for every rank whose keys this one sees, this one first.

        local_kv: (2, B, kv_heads, T / cp, d). Under a window each rank sends directly to those that see some of it.
        """
        shifts = self.list_shifts(local_kv.shape[3])
        if shifts is None:
            yield from self.ring.circulate(local_kv)
            return
        exchanges = [self._start_exchange(shift, local_kv) for shift in shifts[:1]]
        yield self.ring.rank, local_kv
        for index, shift in enumerate(shifts):
            pending = exchanges[index]
            exchanges += [self._start_exchange(later, local_kv) for later in shifts[index + 1 : index + 2]]
            if pending is not None:
                received = pending.wait()
                if self.is_seen(self.ring.rank - shift, shift, local_kv.shape[3]):
                    yield (self.ring.rank - shift) % self.ring.size, received

    def _start_exchange(self, shift: int, local_kv: Tensor) -> PendingReceive | None:
        rank, length = self.ring.rank, local_kv.shape[3]
        outgoing = local_kv if self.is_seen(rank, shift, length) else None
        return self.ring.exchange(shift, outgoing, local_kv if self.is_seen(rank - shift, shift, length) else None)

    def return_gradients(self, gradients: dict[int, Tensor], like: Tensor) -> list[Tensor]:
        """Send the gradients of other ranks' keys to them, and return those that other ranks have for this one's.

        gradients: by rank. like: (2, B, kv_heads, T / cp, d). All keys were sent before, so that no two messages
        between two ranks can be mistaken for each other.
        """
        rank, length, pending = self.ring.rank, like.shape[3], []
        for shift in self.list_shifts(length) or ():
            outgoing = gradients.get((rank - shift) % self.ring.size)
            is_seen = self.is_seen(rank, shift, length)
            exchange = self.ring.exchange(-shift, outgoing, like if is_seen else None)
            pending += [] if exchange is None else [(exchange, is_seen)]
        finished = [(exchange.wait(), is_seen) for exchange, is_seen in pending]  # also those that only send
        return [received for received, is_seen in finished if is_seen]

    def is_seen(self, source: int, shift: int, length: int) -> bool:
        """Whether the rank that is `shift` further than `source` sees a key of it."""
        size = self.ring.size
        return bool(self._make_layout(length).list_pairs((source + shift) % size, source % size, self.rule.window))
