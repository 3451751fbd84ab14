"""Build a user's model without allocating its large parameters, and create each of them later with the same bits.

The constructor runs as usual, but large tensors are on the meta device and every operation on them is recorded, with
the generator's state before each random one. To make a parameter, its own operations are run again. So a rank never
holds more than its share of the model, and the values are those that the constructor would have drawn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpc_train._torch import TorchDispatchMode, memory_number, tree_map_only

LARGE_TENSOR_BYTES = 1 << 20
"""Size in bytes from which tensors are deferred; smaller ones, such as buffers that constructors read, are real."""


class NotDeferrableError(Exception):
    """Raised when a constructor does something that cannot be recorded; build the model normally."""


@dataclass(frozen=True)
class _View:
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
    """Its arguments, with a _View in place of each deferred tensor and a copy of any other."""
    kwargs: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Memory that the operation makes or changes."""
    outputs: tuple[_View | None, ...]
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

    def make(self, view: _View) -> Tensor:
        """Compute the values a deferred tensor has now, in fresh memory."""
        made: dict[int, Tensor] = {}
        with torch.random.fork_rng([]), torch.no_grad():
            for index in self._list_needed(view.memory):
                self._run(self.operations[index], made)
        return _cut_view(made, view)

    def _list_needed(self, memory: int) -> list[int]:
        """Return the operations that lead to a memory's values, in order."""
        found: set[int] = set()
        waiting = [(memory, len(self.operations))]
        while waiting:
            wanted, before = waiting.pop()
            for index in self.writers.get(wanted, ()):
                if index < before and index not in found:  # what is written after the read does not matter to it
                    found.add(index)
                    operation = self.operations[index]
                    waiting += [(storage, index) for storage in {*operation.reads, *operation.writes} - {wanted}]
        return sorted(found)

    def _run(self, operation: _Operation, made: dict[int, Tensor]) -> None:
        args, kwargs = (
            tree_map_only(_View, lambda view: _cut_view(made, view), given)
            for given in (operation.args, operation.kwargs)
        )
        if operation.generator is not None:
            torch.set_rng_state(operation.generator)
        out = operation.function(*args, **kwargs)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for view, tensor in zip(operation.outputs, outputs, strict=False):
            if view is not None:
                made[view.memory] = tensor


def _cut_view(made: dict[int, Tensor], view: _View) -> Tensor:
    base = made[view.memory]
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

    def find_view(self, tensor: Tensor) -> _View:
        """Return where a deferred tensor lies: its memory, and which part of that."""
        return _View(
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
        given = _list_tensors((args, kwargs))
        deferred = [tensor for tensor in given if self.is_deferred(tensor)]
        if not deferred:
            return self._run_factory(func, args, kwargs) if not given else func(*args, **kwargs)
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
        made = [] if written else _list_tensors(out)
        for tensor in made:
            self.record.alive[memory_number(tensor)] = tensor
        reads = tuple(memory_number(tensor) for tensor in _list_tensors((args, kwargs)) if self.is_deferred(tensor))
        writes = tuple(memory_number(tensor) for tensor in (written or made))
        outputs = (
            tuple(self.find_view(result) if isinstance(result, Tensor) else None for result in _as_tuple(out))
            if made
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

        def freeze(x: Tensor) -> Tensor | _View:
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
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found


def _find_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += _list_tensors(value)
    return found


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


class DeferredValues(MutableMapping[str, Tensor]):
    """Whole parameters by name, each made on request and not kept."""

    def __init__(
        self, entries: dict[str, Tensor | _View | Callable[[], Tensor]], record: OperationRecord | None = None
    ) -> None:
        self._entries, self._record = entries, record or OperationRecord()

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry
        return self._record.make(entry) if isinstance(entry, _View) else entry()

    def defer(self, name: str, make: Callable[[], Tensor]) -> None:
        """Let `make` compute a parameter on request, such as by reading it from a file."""
        self._entries[name] = make

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def subset(self, names: Iterable[str]) -> DeferredValues:
        """Return the values of these names only."""
        return DeferredValues({name: self._entries[name] for name in names}, self._record)


def build_deferred(make: Callable[[], Any]) -> tuple[nn.Module, DeferredValues] | None:
    """Return (the module that `make` returns, with its parameters on the meta device; their values). Buffers are real.

    Returns None if the constructor does something that cannot be recorded, or fails; build the model normally then.
    """
    mode = DeferringMode()
    try:
        with mode, CpuDisguise(mode):
            model = make()
        if not isinstance(model, nn.Module):
            return None
        _make_plain_tensors(model, mode)
        entries: dict[str, Tensor | _View | Callable[[], Tensor]] = {
            name: mode.find_view(parameter) if mode.is_deferred(parameter) else parameter.detach()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
    except Exception:  # from the user's code, in an environment it was not written for
        return None
    return model, DeferredValues(entries, mode.record)


def _make_plain_tensors(model: nn.Module, mode: DeferringMode) -> None:
    """Make deferred tensors that are not parameters. Raises NotDeferrable if memory is shared or held elsewhere."""
    parameters = dict(model.named_parameters())
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        if tensor.is_meta and not mode.is_deferred(tensor):
            raise NotDeferrableError(f"{name} is on the meta device by another way")
    owners = {memory_number(parameter): parameter for parameter in parameters.values() if mode.is_deferred(parameter)}
    if any(owners.get(memory_number(parameter), parameter) is not parameter for parameter in parameters.values()):
        raise NotDeferrableError("parameters in the same memory")
    real: dict[int, Tensor] = {}
    for module in model.modules():
        _make_plain_tensors_of(module, mode, owners, real)
    _check_unheld(mode, {id(parameter) for parameter in parameters.values()})


def _make_plain_tensors_of(
    module: nn.Module, mode: DeferringMode, owners: dict[int, nn.Parameter], real: dict[int, Tensor]
) -> None:
    """Make a module's deferred tensors that are not parameters.

    real: tensors made already, so that what modules share stays shared.
    """
    plain = [] if isinstance(module, nn.RNNBase) else iterate_plain_tensors(module)  # it keeps a list of its parameters
    for name, tensor in [*module.named_buffers(recurse=False, remove_duplicate=False), *plain]:
        if not mode.is_deferred(tensor):
            continue
        if getattr(module, name, None) is not tensor or memory_number(tensor) in owners:
            raise NotDeferrableError("a tensor in a container, or in the memory of a parameter")
        if id(tensor) not in real:
            real[id(tensor)] = mode.make(tensor)
        setattr(module, name, real[id(tensor)])


def _check_unheld(mode: DeferringMode, recorded: set[int]) -> None:
    """Raise NotDeferrable if anything else holds a deferred tensor, and would find it without values."""
    recorded = recorded | {id(tensor) for tensor in mode.record.alive.values()}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor) and id(item) not in recorded and mode.is_deferred(item):
            raise NotDeferrableError("a tensor that the model does not hold itself")


def iterate_plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (attribute, tensor) for a module's tensors that are not parameters or buffers, also in lists and dicts."""
    for name, value in list(vars(module).items()):
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((name, item) for item in value if isinstance(item, Tensor))
        elif isinstance(value, dict):
            yield from ((name, item) for item in value.values() if isinstance(item, Tensor))
