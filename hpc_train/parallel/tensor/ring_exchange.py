"""Pass chunks of tensors around the ranks of a group in a ring, while others compute with those that have arrived.

`circulate_shards` is an all-gather and `reduce_products` a reduce-scatter, both chunk by chunk. Point-to-point messages
work on gloo and NCCL alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.traffic.model_axes import MAX_CHUNKS, MIN_CHUNK_BYTES

ShardPlace = tuple[int, slice]
"""Index of some rows of one rank's shard in a tensor (ranks, rows, features)."""


@dataclass(frozen=True)
class MatmulRing:
    """The ranks of a group as a ring: each sends to the next and receives from the previous one."""

    group: dist.ProcessGroup
    chunk_bytes: int = MIN_CHUNK_BYTES
    """Minimum bytes of a chunk."""

    @property
    def rank(self) -> int:
        """Index of this process in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    def split_rows(self, shard: Tensor) -> list[slice]:
        """Split the rows of a shard (rows, features) into chunks, alike on every rank, as all shards have one shape."""
        rows = len(shard)
        count = max(1, min(rows, MAX_CHUNKS, shard.nbytes // self.chunk_bytes))
        ends = [rows * index // count for index in range(count + 1)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def exchange(self, outgoing: Tensor, incoming: Tensor) -> ChunkTransfer:
        """Start sending a contiguous tensor to the next rank and receiving one from the previous rank."""
        following, preceding = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send = dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=following)
        receive = dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=preceding)
        works = dist.batch_isend_irecv([send, receive])  # one work for each on gloo, a single one for both on NCCL
        return ChunkTransfer(outgoing, incoming, works[0], works[-1])


@dataclass(frozen=True)
class ChunkTransfer:
    """A chunk that is being sent and one that is being received; keeps both tensors alive."""

    outgoing: Tensor
    incoming: Tensor
    sending: dist.Work
    receiving: dist.Work

    def wait(self) -> Tensor:
        """Wait until the incoming chunk is received; returns it."""
        self.receiving.wait()
        return self.incoming


def circulate_shards(shards: Tensor, ring: MatmulRing) -> Iterator[ShardPlace]:
    """All-gather shards around the ring; yields the index of each chunk as soon as it has arrived.

    shards: (ranks, rows, features), contiguous, with this rank's own shard filled in; the others are received.
    """
    chunks = ring.split_rows(shards[0])
    transfers: list[ChunkTransfer] = []

    def pass_on(step: int, rows: slice) -> ChunkTransfer:
        transfers.append(
            ring.exchange(
                shards[_find_previous_rank(ring, step), rows], shards[_find_previous_rank(ring, step + 1), rows]
            )
        )
        return transfers[-1]

    following = [pass_on(0, rows) for rows in chunks]
    yield ring.rank, slice(None)
    for step in range(1, ring.size):
        current, following = following, []
        for transfer, rows in zip(current, chunks, strict=True):
            transfer.wait()
            if step + 1 < ring.size:
                following.append(pass_on(step, rows))
            yield _find_previous_rank(ring, step), rows
    # Only now, so that no product waited for a send.
    for transfer in transfers:
        transfer.sending.wait()


def reduce_products(
    product: Callable[[ShardPlace], Tensor],
    total: Tensor,
    ring: MatmulRing,
    meanwhile: Callable[[int, int], None] = lambda part, parts: None,
) -> None:
    """Reduce-scatter products around the ring, computing each while the partial sums of other ranks are on their way.

    product: computes this rank's product for a place. Fills `total` (rows, features) with the sum over all ranks of
    their products for this rank's shard. meanwhile: other work, called with (part, parts) once for each
    shard that is on its way, so that the work is cut into `parts` equal parts.

    In order of time, on rank r of 3:
        step 0   compute the product for the shard of rank r - 1, and start to send it to rank r + 1
        step 1   meanwhile(0, 2); compute the one for rank r - 2; add what has arrived; start to send the sum
        step 2   meanwhile(1, 2); compute the one for rank r itself; add what has arrived: the total
    So each message is on its way while a whole product is computed.
    """
    chunks = ring.split_rows(total)
    outgoing: list[ChunkTransfer] = []
    transfers: list[ChunkTransfer] = []
    for step in range(ring.size):
        shard, partial_sums, outgoing = _find_previous_rank(ring, step + 1), outgoing, []
        if step:
            meanwhile(step - 1, ring.size - 1)
        for index, rows in enumerate(chunks):
            part = product((shard, rows))
            if step:
                part = partial_sums[index].wait().add_(part)
            if step + 1 < ring.size:
                outgoing.append(ring.exchange(part, torch.empty_like(part)))
            else:
                total[rows] = part
        transfers += outgoing
    for transfer in transfers:
        transfer.sending.wait()


def _find_previous_rank(ring: MatmulRing, steps: int) -> int:
    return (ring.rank - steps) % ring.size
