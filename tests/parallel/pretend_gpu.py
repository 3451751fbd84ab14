"""A pretended GPU: tensors without memory on a device whose streams and operators are recorded.

torch lets a Python program register a device of its own ("gpu" here), for which autograd, fully_shard and DTensor ask
for streams and events as they do on CUDA. A dispatch mode sees every operator with the stream that is current, and
which of them would make the host wait for a real GPU. The registration cannot be undone, so it must only be used in a
process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from hpc_train._torch.rehearsal import MemorylessMode, assume_known_shapes, tensors_in
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.interfaces import World
from hpc_train.runtime.start import leave_process_group, make_world

GPU = "gpu"
DEFAULT_STREAM = "compute"


@dataclass(frozen=True)
class Entry:
    """An operator, or a stream's wait for another, in the order of the host."""

    stream: str
    what: str
    """Name of the operator; `wait STREAM` where the stream waits."""


@dataclass
class Trace:
    """What the host has asked of the device."""

    entries: list[Entry] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """Operators for which the host would have waited for the device."""
    before: list[str] = field(default_factory=list)
    """Collectives before the first step."""

    def streams_of(self, operator: str) -> set[str]:
        """Return the streams on which operators of this name ran."""
        return {entry.stream for entry in self.entries if operator in entry.what}

    def count(self, operator: str) -> int:
        """Count the operators of this name."""
        return sum(operator in entry.what for entry in self.entries)

    def count_waits(self, stream: str, other: str) -> int:
        """Count how often a stream was made to wait for another."""
        return self.entries.count(Entry(stream, f"wait {other}"))

    def begin_steps(self) -> None:
        """Start over: the entries so far came before the first step."""
        self.before = [entry.what for entry in self.entries if entry.what.startswith("c10d")]
        self.clear()

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()
        self.waits.clear()


class PretendStream:
    """Stands for a torch.Stream; its name is its number in the order in which streams were made."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.name = f"stream {PRETEND.made}" if PRETEND.made else DEFAULT_STREAM
        PRETEND.made += 1

    def wait_stream(self, other: PretendStream) -> None:
        PRETEND.trace.entries.append(Entry(self.name, f"wait {other.name}"))

    def wait_event(self, event: PretendEvent) -> None:
        PRETEND.trace.entries.append(Entry(self.name, f"wait {event.name}"))

    def record_event(self, event: PretendEvent | None = None) -> PretendEvent:
        return (event or PretendEvent()).record(self)

    def synchronize(self) -> None:
        PRETEND.trace.waits.append(f"{self.name}.synchronize")


class PretendEvent:
    """Stands for a torch.Event, and knows the stream that it was recorded in."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.name = "nothing"

    def record(self, stream: PretendStream | None = None) -> PretendEvent:
        self.name = (stream or PRETEND.current).name
        return self

    def wait(self, stream: PretendStream | None = None) -> None:
        (stream or PRETEND.current).wait_event(self)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        PRETEND.trace.waits.append("Event.synchronize")


class _Module(backend_registration._DummyBackendModule):  # type: ignore[misc]
    """torch.gpu: what torch and this project ask of a device's module."""

    Stream = PretendStream
    Event = PretendEvent
    made = 0
    current: PretendStream
    trace: Trace

    def current_stream(self, device: Any = None) -> PretendStream:
        return self.current

    @contextmanager
    def stream(self, stream: PretendStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def set_device(self, device: Any) -> None: ...

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        PRETEND.trace.waits.append("synchronize")


PRETEND = _Module()

aten = torch.ops.aten
_ALWAYS_WAIT = (
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.allclose.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
)
_ASKING = _ALWAYS_WAIT[:3]


class TracingMode(MemorylessMode):
    """MemorylessMode that also keeps tensors of the pretended device, and records what is asked of it."""

    def __init__(self, trace: Trace, integer: int) -> None:
        """integer: the value of every integer that the host reads from the device."""
        super().__init__(lambda *_: None)
        self._trace, self._integer = trace, integer

    def value_of(self, dtype: torch.dtype) -> bool | float:
        return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else self._integer

    def read_list(self, tensor: FakeTensor) -> Any:
        """Stand for Tensor.tolist: one copy on a GPU, while torch asks a FakeTensor for one element after the other."""
        if tensor.device.type == GPU:
            self._trace.waits.append("tolist")
        return _nest(tuple(tensor.shape), self.value_of(tensor.dtype))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        given = list(tensors_in((*args, *kwargs.values())))
        here = any(tensor.device.type == GPU for tensor in given)
        made = torch.device(str(kwargs["device"])).type == GPU if kwargs.get("device") is not None else False
        if not self._nesting and (here or made):
            self._trace.entries.append(Entry(PRETEND.current.name, str(func)))
            if (why := find_host_wait(func, args, kwargs, given)) is not None:
                self._trace.waits.append(why)
        if func in _ASKING and here:
            return self.value_of(given[0].dtype) if func is _ASKING[0] else True
        if made:
            args, kwargs = tree_map_only(Tensor, _drop_values, (args, kwargs))
            return self._shaped(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _nest(shape: tuple[int, ...], value: float) -> Any:
    return [_nest(shape[1:], value) for _ in range(shape[0])] if shape else value


def _drop_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape without values: torch would compute with a constant of the host, on no kernel.

    It is a new tensor because the mode refers to the tensors it has seen, and a parameter that is referred to cannot be
    replaced.
    """
    return tensor if isinstance(tensor, FakeTensor) else torch.empty_like(tensor, device="meta")


def find_host_wait(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> str | None:
    """Return why an operator on a GPU makes the host wait; None if it does not. As torch.cuda.set_sync_debug_mode."""
    if func in _ALWAYS_WAIT:
        return str(func)
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return f"{func} without output_size"
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return f"{func} by a mask"
        if any(index.device.type == "cpu" for index in indices):
            return f"{func} by an index of the host"
    if func is aten._to_copy.default and kwargs.get("device") is not None:
        to, blocks = torch.device(str(kwargs["device"])), not kwargs.get("non_blocking", False)
        if to.type != given[0].device.type and blocks and not given[0].is_meta:
            return f"copy from {given[0].device.type} to {to.type}"
    if func is aten.copy_.default:
        target, source = given[:2]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if target.device.type != source.device.type and blocks:
            return f"copy from {source.device.type} to {target.device.type}"
    return None


@contextmanager
def pretend_gpu(world: World, parallel: ParallelConfig, integer: int = 1) -> Iterator[tuple[World, Trace]]:
    """Enter a world of the pretended device with the ranks of `world`, in a process that has not used autograd yet.

    integer: the value of every integer that the host reads from the device.
    """
    if not hasattr(torch, GPU):
        hook, guard = backend_registration._DummyPrivateUse1Hook(), backend_registration._DummyDeviceGuard()
        backend_registration._setup_privateuseone_for_python_backend(GPU, PRETEND, hook, guard)
    leave_process_group()
    dist.init_process_group(f"cpu:fake,{GPU}:fake", rank=world.rank, world_size=world.size, store=FakeStore())
    dist._verify_params_across_processes = lambda *_: None  # DDP would read what no other rank has sent
    PRETEND.trace = trace = Trace()
    PRETEND.made = 0
    PRETEND.current = PretendStream()
    mode = TracingMode(trace, integer)
    FakeTensor.tolist = lambda tensor: mode.read_list(tensor)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="gpu") makes it on the host and copies it
    degrees = resolve_degrees(parallel, world.size)
    with assume_known_shapes(), mode:
        yield make_world(world.rank, world.size, 0, torch.device(GPU, 0), degrees), trace
