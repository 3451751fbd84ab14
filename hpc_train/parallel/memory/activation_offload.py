"""Keep the tensors that a block saves for backward in CPU memory (Rhu et al. 2016, arXiv:1602.08124)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from hpc_train._torch import tensor_version
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.user_model import Forward, get_blocks, replace_forward

MIN_OFFLOAD_BYTES = 1 << 12
"""Minimum bytes of an offloaded tensor: copying a smaller one costs more than it saves."""

CopyBack = Callable[[], Tensor]
"""Brings a saved tensor back to where it was."""
StorageKey = tuple[Any, ...]


def offload_activations(part: nn.Module, world: World) -> str:
    """Move tensors that blocks save for backward to pinned CPU memory until then; parameters stay."""
    if world.device.type == "cpu":
        raise UserError(
            "parallel.recompute.offload=true: this rank computes on a CPU, whose memory is where activations are; "
            "leave it out"
        )
    blocks = get_blocks(part, "parallel.recompute.offload=true")
    for block in blocks:
        replace_forward(block, partial(wrap_offload, block))
    return f"offload of activations: {len(blocks)} blocks, {world.device.type} to CPU memory"


def wrap_offload(block: nn.Module, forward: Forward) -> Forward:
    """Wrap `forward` so that the tensors it saves for backward, except parameters, are copies in CPU memory."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Computed for each call: sharded parameters are gathered into other memory for every forward.
        stay = {_memory(parameter).cdata for parameter in block.parameters()}
        moves = _Moves(stay)
        with saved_tensors_hooks(moves.pack, _unpack):
            return forward(*args, **kwargs)

    return run


def _unpack(back: CopyBack) -> Tensor:
    return back()


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's memory; its number is unique as long as the reference exists."""
    return StorageWeakRef(_local(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class _Moves:
    """The copies made in one forward of a block; a tensor that several operators save is copied once."""

    stay: set[int]
    """Numbers of memory that is not moved."""
    made: dict[StorageKey, tuple[StorageWeakRef, Tensor]] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> CopyBack:
        """Copy a tensor to CPU memory; returns a function that brings it back."""
        if not isinstance(tensor, DTensor):
            return self._move(tensor)
        inner = self._move(_local(tensor))
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return lambda: DTensor.from_local(inner(), mesh, placements, run_check=False, shape=shape, stride=stride)

    def _move(self, tensor: Tensor) -> CopyBack:
        source = _memory(tensor)
        if source.cdata in self.stay or tensor.nbytes < MIN_OFFLOAD_BYTES or type(tensor) not in (Tensor, nn.Parameter):
            return lambda: tensor
        copy = self._copy(tensor, source)
        device = tensor.device
        # From pinned memory in the order of the stream, so that neither side waits for the other.
        return lambda: copy.to(device, non_blocking=True, copy=True)

    def _copy(self, tensor: Tensor, source: StorageWeakRef) -> Tensor:
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor_version(tensor))
        key = (source.cdata, *layout)
        earlier = self.made.get(key)
        if earlier is not None and not earlier[0].expired():  # type: ignore[no-untyped-call]
            return earlier[1]
        pinned = tensor.device.type == "cuda"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        copy.copy_(tensor, non_blocking=pinned)
        self.made[key] = (source, copy)
        return copy
