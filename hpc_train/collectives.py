"""Exchange plain values between ranks. torch's own collectives of objects unpickle what comes from the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from hpc_train.messages import PLAIN, Codec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def all_gather_values(mine: T, group: ProcessGroup | None = None, codec: Codec = PLAIN) -> list[T]:
    """Return the values of all ranks of the group, in rank order. Uses CPU tensors."""
    message = _tensor(codec.encode(mine))
    lengths = _lengths(message, group)
    found = list(torch.empty(len(lengths), max(lengths), dtype=torch.uint8))
    dist.all_gather(found, _padded(message, max(lengths)), group=group)
    return [codec.decode(it[:length].numpy().tobytes()) for it, length in zip(found, lengths, strict=True)]


def gather_values(mine: T, group: ProcessGroup | None = None, codec: Codec = PLAIN) -> list[T] | None:
    """Return the values of all ranks of the group, in rank order, on rank 0; None on the others."""
    message = _tensor(codec.encode(mine))
    lengths = _lengths(message, group)
    first = dist.get_rank(group) == 0
    found = list(torch.empty(len(lengths), max(lengths), dtype=torch.uint8)) if first else None
    dist.gather(_padded(message, max(lengths)), found, group_dst=0, group=group)
    if found is None:
        return None
    return [codec.decode(it[:length].numpy().tobytes()) for it, length in zip(found, lengths, strict=True)]


def broadcast_value(value: T | None, group: ProcessGroup | None = None, codec: Codec = PLAIN) -> T:
    """Return rank 0's value on every rank; the values of the others are ignored."""
    first = dist.get_rank(group) == 0
    message = _tensor(codec.encode(value) if first else b"")
    length = torch.tensor([len(message)])
    dist.broadcast(length, group_src=0, group=group)
    message = message if first else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, group_src=0, group=group)
    found: T = codec.decode(message.numpy().tobytes())
    return found


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _padded(message: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(message, (0, length - len(message)))


def _lengths(message: Tensor, group: ProcessGroup | None) -> list[int]:
    found = list(torch.empty(dist.get_world_size(group), 1, dtype=torch.int64))
    dist.all_gather(found, torch.tensor([len(message)]), group=group)
    return [int(it) for it in found]
