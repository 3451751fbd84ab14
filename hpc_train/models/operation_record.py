"""Run a constructor with large tensors on the meta device, and record every operation on them, to be run again later.

The generator's state before each random operation is recorded, so that a tensor made later has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpc_train._torch.observation import TorchDispatchMode
from hpc_train._torch.tensors import memory_number, tree_map_only

LARGE_TENSOR_BYTES = 1 << 20
"""Size in bytes from which tensors are deferred; smaller ones, such as buffers that constructors read, are real."""


class NotDeferrableError(Exception):
    """Raised when a constructor does something that cannot be recorded; build the model normally."""


@dataclass(frozen=True)
class DeferredView:
    """A deferred tensor: its memory, and which part of that it covers."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Operation:
    """A call of one of torch's operators, with what it takes to run it again."""

    function: Any
    args: Any
    """Its arguments, with a DeferredView in place of each deferred tensor and a copy of any other."""
    kwargs: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Memory that the operation makes or changes."""
    outputs: tuple[DeferredView | None, ...]
    """Outputs that lie in the memory it makes."""
    generator: Tensor | None
    """State of torch's generator before the operation, if it is random."""


@dataclass
class OperationRecord:
    """Operations on deferred memory, in order."""

    operations: list[_Operation] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    """For each memory, the operations that write it."""
    alive: dict[int, Tensor] = field(default_factory=dict)
    """Keeps one tensor of each memory alive, so that the memory's number is not reused."""

    def add(self, operation: _Operation) -> None:
        """Append an operation."""
        for memory in operation.writes:
            self.writers.setdefault(memory, []).append(len(self.operations))
        self.operations.append(operation)

    def make(self, view: DeferredView) -> Tensor:
        """Compute the values a deferred tensor has now, in fresh memory."""
        memories: dict[int, Tensor] = {}
        with torch.random.fork_rng([]), torch.no_grad():
            for index in self._list_needed(view.memory):
                self._run(self.operations[index], memories)
        return _cut_view(memories, view)

    def _list_needed(self, memory: int) -> list[int]:
        """Return the operations that lead to a memory's values, in order."""
        needed: set[int] = set()
        waiting = [(memory, len(self.operations))]
        while waiting:
            memory_read, before = waiting.pop()
            for index in self.writers.get(memory_read, ()):
                if index < before and index not in needed:  # what is written after the read does not matter to it
                    needed.add(index)
                    operation = self.operations[index]
                    waiting += [(storage, index) for storage in {*operation.reads, *operation.writes} - {memory_read}]
        return sorted(needed)

    def _run(self, operation: _Operation, memories: dict[int, Tensor]) -> None:
        args, kwargs = (
            tree_map_only(DeferredView, lambda view: _cut_view(memories, view), arguments)
            for arguments in (operation.args, operation.kwargs)
        )
        if operation.generator is not None:
            torch.set_rng_state(operation.generator)
        out = operation.function(*args, **kwargs)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for view, tensor in zip(operation.outputs, outputs, strict=False):
            if view is not None:
                memories[view.memory] = tensor


def _cut_view(memories: dict[int, Tensor], view: DeferredView) -> Tensor:
    base = memories[view.memory]
    if base.dtype != view.dtype:
        raise NotDeferrableError("memory seen as two types")
    return torch.as_strided(base, view.size, view.stride, view.offset)


class DeferringMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put large tensors created inside this mode on the meta device, and record how to make them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = OperationRecord()

    def is_deferred(self, tensor: object) -> bool:
        """Whether a tensor's values are still to be made."""
        return (
            isinstance(tensor, Tensor) and tensor.layout == torch.strided and memory_number(tensor) in self.record.alive
        )

    def find_view(self, tensor: Tensor) -> DeferredView:
        """Return where a deferred tensor lies: its memory, and which part of that."""
        return DeferredView(
            memory_number(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def make(self, tensor: Tensor) -> Tensor:
        """Compute the current values of a deferred tensor."""
        return self.record.make(self.find_view(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise NotDeferrableError("a generator of its own")
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}  # torch itself asks a deferred tensor for its device
        tensors = _list_tensors((args, kwargs))
        deferred = [tensor for tensor in tensors if self.is_deferred(tensor)]
        if not deferred:
            return self._run_factory(func, args, kwargs) if not tensors else func(*args, **kwargs)
        written = _find_written(func, args, kwargs)
        if any(self.is_deferred(tensor) for tensor in written):
            return self._record_operation(func, args, kwargs, written)
        if written:
            return func(*self._make_real(args), **self._make_real(kwargs))
        return self._run_derived(func, args, kwargs, deferred)

    def _run_factory(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that takes no tensor; deferred if its result is large."""
        if not _is_pure(func):
            return func(*args, **kwargs)
        try:
            shaped = func(*args, **{**kwargs, "device": torch.device("meta")})
        except (RuntimeError, TypeError, NotImplementedError):
            return func(*args, **kwargs)
        if not isinstance(shaped, Tensor) or shaped.untyped_storage().nbytes() < LARGE_TENSOR_BYTES:
            return func(*args, **kwargs)
        return self._record_operation(func, args, kwargs, [], shaped)

    def _run_derived(self, func: Any, args: Any, kwargs: Any, deferred: list[Tensor]) -> Any:
        """Run an operation that changes nothing: its result is a view, a large deferred tensor, or real."""
        try:
            out = func(*self._move_to_meta(args), **self._move_to_meta(kwargs))
        except (RuntimeError, TypeError, NotImplementedError):
            return func(*self._make_real(args), **self._make_real(kwargs))
        results = _list_tensors(out)
        if results and all(memory_number(result) in self.record.alive for result in results):
            return out
        if not results or not _is_pure(func) or any(r.untyped_storage().nbytes() < LARGE_TENSOR_BYTES for r in results):
            return func(*self._make_real(args), **self._make_real(kwargs))
        return self._record_operation(func, args, kwargs, [], out)

    def _record_operation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor], out: Any = None) -> Any:
        if any(not self.is_deferred(tensor) for tensor in written):
            raise NotDeferrableError(f"{func} writes what is deferred and what is not")
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            func(*self._replace_by_zeros(args), **self._replace_by_zeros(kwargs))  # advances the generator as it should
        if written:
            out = func(*self._move_to_meta(args), **self._move_to_meta(kwargs))
        created = [] if written else _list_tensors(out)
        for tensor in created:
            self.record.alive[memory_number(tensor)] = tensor
        reads = tuple(memory_number(tensor) for tensor in _list_tensors((args, kwargs)) if self.is_deferred(tensor))
        writes = tuple(memory_number(tensor) for tensor in (written or created))
        outputs = (
            tuple(self.find_view(result) if isinstance(result, Tensor) else None for result in _as_tuple(out))
            if created
            else ()
        )
        self.record.add(
            _Operation(
                func, self._freeze_arguments(args), self._freeze_arguments(kwargs), reads, writes, outputs, state
            )
        )
        return out

    def _freeze_arguments(self, tree: Any) -> Any:
        """Return the arguments to record: views of deferred tensors, copies of the others."""

        def freeze(x: Tensor) -> Tensor | DeferredView:
            if self.is_deferred(x):
                return self.find_view(x)
            if x.device.type != "cpu":
                raise NotDeferrableError("a tensor of another device")
            return x.detach().clone()

        return tree_map_only(Tensor, freeze, tree)

    def _move_to_meta(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x if self.is_deferred(x) else x.to("meta"), tree)

    def _replace_by_zeros(self, tree: Any) -> Any:
        """Replace deferred arguments by real, zeroed memory."""

        def make_zeros(x: Tensor) -> Tensor:
            if not self.is_deferred(x):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").zero_()

        return tree_map_only(Tensor, make_zeros, tree)

    def _make_real(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: self.make(x) if self.is_deferred(x) else x, tree)


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _list_tensors(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, tree)
    return tensors


def _find_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written += _list_tensors(value)
    return written


def _is_pure(func: Any) -> bool:
    """Whether an operator changes no argument, and its results are no views of them."""
    return not func._schema.is_mutable and all(returned.alias_info is None for returned in func._schema.returns)


class CpuDisguise(TorchFunctionMode):
    """Make deferred tensors claim to be on the CPU: some code, torch.nn.init's too, skips meta tensors."""

    def __init__(self, mode: DeferringMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS and self._mode.is_deferred(args[0]):
            return _ANSWERS[func]
        return func(*args, **(kwargs or {}))


_ANSWERS = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: torch.device("cpu"),
}
