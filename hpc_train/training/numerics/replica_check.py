"""Compare the copies of parameters that several ranks hold, to find a bit that flipped on one of them.

Every rank adds up the bits of its parameters, as integers; ranks that hold the same rectangles of the same tensors must
come to the same sum, because they have made the same updates from the same averaged gradients. One all-gather of two
numbers per rank, and one pass over the parameters, every `resilience.numbers.compare_every` steps. With three copies or
more the rank that differs is named. Optimizer state is not compared, nor are parameters without copies: with zero1 to
zero3 each rank has its own share, and only dp_replicate makes copies of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.interfaces import Engine, World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """The parameters of one rank, and what they are compared with."""

    def __init__(self, engine: Engine, world: World) -> None:
        """A collective in some engines. Buffers are left out: those of batch normalisation differ between ranks."""
        parameters = {name for part in engine.parts for name, _ in part.named_parameters()}
        shards = [shard for shard in engine.shards() if shard.name in parameters]
        self._tensors, self.world = [shard.local for shard in shards], world
        places = sorted((shard.name, shard.offset, tuple(shard.local.shape)) for shard in shards)
        self._place = int.from_bytes(hashlib.sha256(repr(places).encode()).digest()[:7], "little")

    def find_differing_ranks(self) -> tuple[list[int], bool]:
        """Return the ranks whose parameters differ from those of their copies, and whether they are surely at fault.

        With two copies it is unknown which one is wrong: both are returned. The same on every rank; a collective.
        """
        local_sum = torch.tensor([self._place, self.add_up()], dtype=torch.int64)
        if self.world.size == 1:
            return [], True
        sums = [torch.empty_like(local_sum) for _ in range(self.world.size)]
        dist.all_gather(sums, local_sum, group=self.world.group)
        differing, is_certain = find_minority([(int(place), int(bits)) for place, bits in sums])
        if self.world.group is not None:  # some ranks are lost: the others have the numbers that they began with
            differing = [dist.get_global_rank(self.world.group, index) for index in differing]
        return differing, is_certain

    def has_same_rounding(self) -> bool:
        """Return whether the devices of all ranks make the same bits of the same numbers; a collective.

        Devices of different kinds may not. Copies of parameters then drift apart without any fault.
        """
        local_result = torch.tensor(probe_rounding(self.world.device), dtype=torch.int64)
        results = [torch.empty_like(local_result) for _ in range(self.world.size)]
        dist.all_gather(results, local_result, group=self.world.group)
        return all(int(other) == int(local_result) for other in results)

    def add_up(self) -> int:
        """Return the sum of the bits of this rank's parameters, as integers modulo 2^64."""
        return add_up_bits(self._tensors, self.world.device)


def add_up_bits(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the sum of the bits of tensors, as integers modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        total += bits.sum(dtype=torch.int64).to(total.device)
    return int(total)


def probe_rounding(device: torch.device) -> int:
    """Return the sum of the bits of what a device makes of fixed numbers by the operations of clipping and updating.

    The order in which a device adds up a norm, its fused operations and its matrix products are what may differ.
    """
    # Made on the CPU, so that all devices start from the same bits.
    values = (torch.arange(1 << 20, dtype=torch.float32) % 9973 + 1).div_(7919).to(device)
    moment = values.lerp(values.square(), 0.1)
    update = torch.addcdiv(values, moment, moment.sqrt().add_(1e-8), value=-1e-3)
    update.div_(torch.linalg.vector_norm(values) + 1e-6)
    square = update[: 1 << 16].view(256, 256)
    half = square.to(torch.bfloat16)
    return add_up_bits([update, square @ square.T, half @ half.T], device)


def find_minority(sums: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
    """Return the indices whose sum is not that of most with the same place, and whether there is such a majority.

    sums: (place, sum of bits) of each rank.
    """
    groups: dict[int, list[int]] = {}
    for rank, (place, _) in enumerate(sums):
        groups.setdefault(place, []).append(rank)
    differing: list[int] = []
    is_certain = True
    for ranks in groups.values():
        counts = Counter(sums[rank][1] for rank in ranks).most_common()
        if len(counts) > 1:
            majority = counts[0][1] > counts[1][1]
            is_certain &= majority
            differing += [rank for rank in ranks if not majority or sums[rank][1] != counts[0][0]]
    return sorted(differing), is_certain
