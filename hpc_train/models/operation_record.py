"""Run a constructor with large tensors on the meta device, and record every operation on them, to be run again later.

DeferringMode sees each call of an operator and decides, in this order:

    no tensor among the arguments   deferred if its result is large, such as torch.empty(4096, 4096)
    no deferred one                 run as it is
    writes a deferred one           recorded, such as weight.normal_(): nothing is computed
    writes only real ones           run, with the deferred arguments computed now
    writes nothing                  a view, another deferred tensor if large, else computed now

OperationRecord.make later runs the recorded operations that lead to one tensor's values. The generator's state before
each random operation is recorded, so that a tensor made later has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpc_train._torch.observation import Operator, TorchDispatchMode
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
class OperatorCall:
    """A call of one of torch's operators, with its arguments in nested tuples, lists and dicts."""

    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run the operator."""
        return self.operator(*self.args, **self.kwargs)

    def map_tensors(self, change: Callable[[Any], object], kind: type = Tensor) -> OperatorCall:
        """Return the call with every argument of this type changed."""
        return OperatorCall(
            self.operator, tree_map_only(kind, change, self.args), tree_map_only(kind, change, self.kwargs)
        )

    def list_tensors(self) -> list[Tensor]:
        """List the tensors among the arguments."""
        return _list_tensors((self.args, self.kwargs))

    def list_written(self) -> list[Tensor]:
        """List the arguments that the operator changes in place."""
        written = []
        for index, argument in enumerate(self.operator._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = self.args[index] if index < len(self.args) else self.kwargs.get(argument.name)
            written += _list_tensors(value)
        return written

    def is_pure(self) -> bool:
        """Whether the operator changes no argument, and its results are no views of them."""
        schema = self.operator._schema
        return not schema.is_mutable and all(returned.alias_info is None for returned in schema.returns)


@dataclass(frozen=True)
class _Operation:
    """A recorded call, with what it takes to run it again."""

    call: OperatorCall
    """With a DeferredView in place of each deferred tensor, and a copy of any other."""
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
                    others = {*operation.reads, *operation.writes} - {memory_read}
                    waiting += [(storage, index) for storage in others]
        return sorted(needed)

    def _run(self, operation: _Operation, memories: dict[int, Tensor]) -> None:
        """Run an operation on real memory; adds the memory that it makes to `memories`."""
        call = operation.call.map_tensors(lambda view: _cut_view(memories, view), DeferredView)
        if operation.generator is not None:
            torch.set_rng_state(operation.generator)
        for view, tensor in zip(operation.outputs, _as_tuple(call.run()), strict=False):
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

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise NotDeferrableError("a generator of its own")
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}  # torch itself asks a deferred tensor for its device
        call = OperatorCall(func, args, kwargs)
        tensors = call.list_tensors()
        if not tensors:
            return self._run_factory(call)
        if not any(self.is_deferred(tensor) for tensor in tensors):
            return call.run()
        written = call.list_written()
        if any(self.is_deferred(tensor) for tensor in written):
            return self._record_write(call, written)
        if written:
            return call.map_tensors(self._make_real).run()
        return self._run_derived(call)

    def _run_factory(self, call: OperatorCall) -> Any:
        """Run an operation that takes no tensor; deferred if its result is large."""
        if not call.is_pure():
            return call.run()
        try:
            shaped = replace(call, kwargs={**call.kwargs, "device": torch.device("meta")}).run()
        except (RuntimeError, TypeError, NotImplementedError):
            return call.run()
        if not isinstance(shaped, Tensor) or shaped.untyped_storage().nbytes() < LARGE_TENSOR_BYTES:
            return call.run()
        return self._record_creation(call, shaped)

    def _run_derived(self, call: OperatorCall) -> Any:
        """Run an operation that changes nothing: its result is a view, a large deferred tensor, or real."""
        try:
            out = call.map_tensors(self._move_to_meta).run()
        except (RuntimeError, TypeError, NotImplementedError):
            return call.map_tensors(self._make_real).run()
        results = _list_tensors(out)
        if results and all(memory_number(result) in self.record.alive for result in results):
            return out
        is_small = any(result.untyped_storage().nbytes() < LARGE_TENSOR_BYTES for result in results)
        if not results or not call.is_pure() or is_small:
            return call.map_tensors(self._make_real).run()
        return self._record_creation(call, out)

    def _record_write(self, call: OperatorCall, written: list[Tensor]) -> Any:
        """Record an operation that changes deferred tensors; returns its result on the meta device."""
        if any(not self.is_deferred(tensor) for tensor in written):
            raise NotDeferrableError(f"{call.operator} writes what is deferred and what is not")
        generator = self._advance_generator(call)
        out = call.map_tensors(self._move_to_meta).run()
        self._add(call, tuple(memory_number(tensor) for tensor in written), (), generator)
        return out

    def _record_creation(self, call: OperatorCall, out: Any) -> Any:
        """Record an operation that makes new tensors. out: its result on the meta device, which is returned."""
        generator = self._advance_generator(call)
        created = _list_tensors(out)
        for tensor in created:
            self.record.alive[memory_number(tensor)] = tensor
        outputs = tuple(self.find_view(result) if isinstance(result, Tensor) else None for result in _as_tuple(out))
        self._add(call, tuple(memory_number(tensor) for tensor in created), outputs, generator)
        return out

    def _advance_generator(self, call: OperatorCall) -> Tensor | None:
        """Return the generator's state before a random operation, and advance it as the operation does."""
        if torch.Tag.nondeterministic_seeded not in call.operator.tags:
            return None
        state = torch.get_rng_state()
        call.map_tensors(self._replace_by_zeros).run()
        return state

    def _add(
        self,
        call: OperatorCall,
        writes: tuple[int, ...],
        outputs: tuple[DeferredView | None, ...],
        generator: Tensor | None,
    ) -> None:
        reads = tuple(memory_number(tensor) for tensor in call.list_tensors() if self.is_deferred(tensor))
        self.record.add(_Operation(call.map_tensors(self._freeze), reads, writes, outputs, generator))

    def _freeze(self, tensor: Tensor) -> Tensor | DeferredView:
        """Return what is recorded of an argument: the view of a deferred tensor, a copy of any other."""
        if self.is_deferred(tensor):
            return self.find_view(tensor)
        if tensor.device.type != "cpu":
            raise NotDeferrableError("a tensor of another device")
        return tensor.detach().clone()

    def _move_to_meta(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_deferred(tensor) else tensor.to("meta")

    def _replace_by_zeros(self, tensor: Tensor) -> Tensor:
        """Return real, zeroed memory in place of a deferred tensor."""
        if not self.is_deferred(tensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()

    def _make_real(self, tensor: Tensor) -> Tensor:
        return self.make(tensor) if self.is_deferred(tensor) else tensor


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _list_tensors(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, tree)
    return tensors


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
