"""Build a user's model without allocating its large parameters, and create each of them later with the same bits.

The constructor runs as usual, but operations on large tensors are only recorded (operation_record.py). To make a
parameter, its own operations are run again. So a rank never holds more than its share of the model, and the values are
those that the constructor would have drawn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from hpc_train._torch.tensors import memory_number
from hpc_train.models.operation_record import (
    CpuDisguise,
    DeferredView,
    DeferringMode,
    NotDeferrableError,
    OperationRecord,
)


class DeferredValues(MutableMapping[str, Tensor]):
    """Whole parameters by name, each made on request and not kept."""

    def __init__(
        self, entries: dict[str, Tensor | DeferredView | Callable[[], Tensor]], record: OperationRecord | None = None
    ) -> None:
        self._entries, self._record = entries, record or OperationRecord()

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry
        return self._record.make(entry) if isinstance(entry, DeferredView) else entry()

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
        entries: dict[str, Tensor | DeferredView | Callable[[], Tensor]] = {
            name: mode.find_view(parameter) if mode.is_deferred(parameter) else parameter.detach()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
    except Exception:  # from the user's code, in an environment it was not written for
        return None
    return model, DeferredValues(entries, mode.record)


def _make_plain_tensors(model: nn.Module, mode: DeferringMode) -> None:
    """Make deferred tensors that are not parameters.

    Raises NotDeferrableError if memory is shared or held elsewhere.
    """
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
    # An RNN keeps a list of its parameters, which are no plain tensors.
    plain_tensors = [] if isinstance(module, nn.RNNBase) else iterate_plain_tensors(module)
    for name, tensor in [*module.named_buffers(recurse=False, remove_duplicate=False), *plain_tensors]:
        if not mode.is_deferred(tensor):
            continue
        if getattr(module, name, None) is not tensor or memory_number(tensor) in owners:
            raise NotDeferrableError("a tensor in a container, or in the memory of a parameter")
        if id(tensor) not in real:
            real[id(tensor)] = mode.make(tensor)
        setattr(module, name, real[id(tensor)])


def _check_unheld(mode: DeferringMode, recorded: set[int]) -> None:
    """Raise NotDeferrableError if anything else holds a deferred tensor, and would find it without values."""
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
