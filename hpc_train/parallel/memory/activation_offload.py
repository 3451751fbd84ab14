"""Keep the tensors that a block saves for backward in CPU memory (Rhu et al. 2016, arXiv:1602.08124).

The order of events on a GPU: when the forward of a block ends, copies of its saved tensors are queued on a separate
stream and overlap the forward of the next block. When the next block ends, the computation waits for these copies, and
the originals are freed. The saved tensors of the last block stay on the GPU, because backward begins there. When the
backward of a block begins, the copies back for the previous block are queued and overlap it. At most two blocks have
their saved tensors on the GPU at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from hpc_train._torch.tensors import is_memoryless, tensor_version
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.memory.copy_stream import CopyStream, HostMemory, HostPlace, Mark
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
    moves = ActivationMoves(world.device)
    for block in blocks:
        replace_forward(block, partial(wrap_offload, block, moves))
    return f"offload of activations: {len(blocks)} blocks, {world.device.type} to CPU memory"


def wrap_offload(block: nn.Module, moves: ActivationMoves, forward: Forward) -> Forward:
    """Wrap `forward` so that the tensors it saves for backward, except parameters, are moved to CPU memory.

    moves: the same for all blocks of a model.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # Computed for each call: sharded parameters are gathered into other memory for every forward.
        stay = {_make_memory_reference(parameter).cdata for parameter in block.parameters()}
        saving = _Saving(moves.begin_forward(), stay)
        with saved_tensors_hooks(saving.pack, _unpack):
            out = forward(*args, **kwargs)
        moves.end_forward(saving.forward, type(block).__name__)
        return out

    return run


def _unpack(back: CopyBack) -> Tensor:
    return back()


def _make_memory_reference(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's memory; its number is unique as long as the reference exists."""
    return StorageWeakRef(_get_local_tensor(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def _get_local_tensor(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SavedTensor:
    """A tensor that one or more operators of a block saved for backward; autograd lets go of it after their backward.

    It is on the device (`original`), then also in host memory, then only there, then on the device again (`returned`).
    """

    def __init__(self, forward: BlockForward, original: Tensor) -> None:
        self.forward = forward
        self.original: Tensor | None = original.detach()
        self.version = tensor_version(original)
        self.host: HostPlace | None = None
        self.returned: Tensor | None = None

    def __del__(self) -> None:
        if self.host is not None:
            self.forward.moves.memory.give_back(self.host)

    def get(self) -> Tensor:
        """Return the tensor on the device."""
        self.forward.moves.begin_backward(self.forward)
        tensor = self.original if self.original is not None else self.returned
        assert tensor is not None
        return tensor


@dataclass(eq=False)
class BlockForward:
    """One forward of a block."""

    moves: ActivationMoves
    previous: weakref.ref[BlockForward] | None
    """The previous forward, of any block; it is freed after its backward."""
    saved: list[weakref.ref[SavedTensor]] = field(default_factory=list)
    copied: Mark = None
    """Behind the copies to the host."""
    returned: Mark = None
    """Behind the copies back."""
    backward: bool = False
    """Whether its backward has begun."""

    def list_living(self) -> list[SavedTensor]:
        """List what backward still needs."""
        return [tensor for tensor in (reference() for reference in self.saved) if tensor is not None]


class ActivationMoves:
    """Moves what the blocks of a model saved to the host and back, in time for backward."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.memory = CopyStream(device), HostMemory(device)
        self._last: weakref.ref[BlockForward] | None = None
        self._resident: BlockForward | None = None
        """The forward whose originals are still on the device."""
        self._ahead: tuple[Mark, list[Tensor]] = (None, [])
        """Tensors fetched last, which are not freed before the computation has waited for their copies."""

    def begin_forward(self) -> BlockForward:
        """Return a new forward, after all before it."""
        forward = BlockForward(self, self._last)
        self._last = weakref.ref(forward)
        return forward

    def end_forward(self, forward: BlockForward, block: str) -> None:
        """Copy what a forward saved to the host, and let go of the originals of the one before it."""
        living = forward.list_living()
        if any(tensor.original is not None and tensor_version(tensor.original) != tensor.version for tensor in living):
            raise UserError(
                f"parallel.recompute.offload=true: the forward of {block} changes a tensor in place after an operator "
                "has saved it for backward; leave that out"
            )
        with torch.no_grad(), self.stream.queue():
            for tensor in living:
                assert tensor.original is not None
                tensor.host = self.memory.take(tensor.original)
                tensor.host.tensor.copy_(tensor.original, non_blocking=True)
        forward.copied = self.stream.mark()
        self.release_originals()
        self._resident = forward if living else None

    def release_originals(self) -> None:
        """Let go of the originals of the last forward that has ended, once they are copied."""
        forward, self._resident = self._resident, None
        if forward is not None and (living := forward.list_living()):
            self.stream.wait(forward.copied)
            for tensor in living:
                tensor.original = None

    def begin_backward(self, forward: BlockForward) -> None:
        """Make what a forward saved usable on the device, and fetch what the one before it saved."""
        if forward.backward:
            return
        forward.backward = True
        self._fetch(forward)
        self.stream.wait(forward.returned)
        if self._ahead[0] is forward.returned:
            self._ahead = (None, [])
        before = None if forward.previous is None else forward.previous()
        if before is not None:
            self._fetch(before)

    def _fetch(self, forward: BlockForward) -> None:
        offloaded = [
            (tensor, tensor.host.tensor)
            for tensor in forward.list_living()
            if tensor.original is None and tensor.returned is None and tensor.host is not None
        ]
        if not offloaded:
            return
        self.stream.wait(self._ahead[0])
        # Made on the stream of the computation, which frees them, too.
        places = [torch.empty_like(host, device=self.stream.device) for _, host in offloaded]
        with torch.no_grad(), self.stream.queue():
            for (tensor, host), place in zip(offloaded, places, strict=True):
                tensor.returned = place.copy_(host, non_blocking=True)
        forward.returned = self.stream.mark()
        self._ahead = forward.returned, places if forward.returned is not None else []


@dataclass
class _Saving:
    """Tensors that one forward of a block saves; a tensor that several operators save is moved once."""

    forward: BlockForward
    stay: set[int]
    """Numbers of memory that is not moved."""
    made: dict[StorageKey, tuple[StorageWeakRef, weakref.ref[SavedTensor]]] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> CopyBack:
        """Note a tensor that is to be moved; returns a function that brings it back."""
        if not isinstance(tensor, DTensor):
            return self._register(tensor)
        inner = self._register(_get_local_tensor(tensor))
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return lambda: DTensor.from_local(inner(), mesh, placements, run_check=False, shape=shape, stride=stride)

    def _register(self, tensor: Tensor) -> CopyBack:
        source = _make_memory_reference(tensor)
        movable = type(tensor) in (Tensor, nn.Parameter) or is_memoryless(tensor)
        if source.cdata in self.stay or tensor.nbytes < MIN_OFFLOAD_BYTES or not movable:
            return lambda: tensor
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor_version(tensor))
        key = (source.cdata, *layout)
        earlier = self.made.get(key)
        saved = None if earlier is None or earlier[0].expired() else earlier[1]()  # type: ignore[no-untyped-call]
        if saved is None:
            saved = SavedTensor(self.forward, tensor)
            self.forward.saved.append(weakref.ref(saved))
            self.made[key] = (source, weakref.ref(saved))
        return saved.get
