"""Find torch's optimizers inside objects that wrap them: those of Accelerate, Lightning, ZeRO, or a user.

What a wrapper does at a step is its own affair; what has to be saved is the state that torch's optimizer keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpc_train.errors import UserError

Group = dict[str, Any]


def unwrap_optimizers(given: object) -> tuple[list[Optimizer], list[Group]]:
    """Return torch's optimizers in `given`, which is one, several, or objects that hold some; and all outer groups.

    The outer groups are one for each group of the optimizers: the group itself, or that of a ZeroRedundancyOptimizer
    around it, which copies its hyperparameters into the optimizer at every step. Raises UserError for an object without
    an optimizer, and for a wrapper that keeps state of parameters itself.
    """
    optimizers, outer = [], []
    for one in _list_given(given):
        inner = _unwrap(one)
        optimizers += inner
        groups = [group for optimizer in inner for group in optimizer.param_groups]
        outer += one.param_groups if isinstance(one, Optimizer) and _is_zero(one) else groups
    return optimizers, outer


def _list_given(given: object) -> list[object]:
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, Iterable) and not isinstance(given, Optimizer) else [given]


def _unwrap(optimizer: object) -> list[Optimizer]:
    """Return the optimizers in an object; the object itself where it holds no other."""
    if isinstance(optimizer, LRScheduler):
        raise UserError("optimizer= has a scheduler in it; save its state_dict() through extra=")
    inner = [unwrapped for part in _list_inner(optimizer) for unwrapped in _unwrap(part)]
    if not isinstance(optimizer, Optimizer):
        if inner:
            return inner
        raise UserError(f"optimizer= has a {type(optimizer).__name__} in it, which neither is nor holds an optimizer")
    if not inner or _is_zero(optimizer):
        return inner or [optimizer]
    _refuse_own_state(optimizer, inner)
    covered = set(_list_parameters(inner))
    return inner if covered.issuperset(_list_parameters([optimizer])) else [optimizer, *inner]


def _is_zero(optimizer: Optimizer) -> bool:
    """Whether this is a ZeroRedundancyOptimizer, whose module is slow to import and warns; here only others do."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _list_inner(optimizer: object) -> Iterator[object]:
    """List the optimizers among the attributes of an object, also in lists and dictionaries; each once."""
    seen: set[int] = set()
    for value in getattr(optimizer, "__dict__", {}).values():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for one in several:
            if isinstance(one, Optimizer) and one is not optimizer and id(one) not in seen:
                seen.add(id(one))
                yield one


def _list_parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _refuse_own_state(optimizer: Optimizer, inner: Sequence[Optimizer]) -> None:
    """Raise UserError where both have state of a parameter: either would be lost, or written over the other."""
    for parameter in _list_parameters(inner):
        state = optimizer.state.get(parameter)
        if state and not any(one.state.get(parameter) is state for one in inner):
            kind, other = type(optimizer).__name__, " and ".join(sorted({type(one).__name__ for one in inner}))
            raise UserError(
                f"{kind} keeps state of its own ({', '.join(map(str, state))}) beside the {other} in it, and one "
                f"optimizer's state of a parameter can be saved: give optimizer= the {other} in it, and put what else "
                "the next step needs into extra="
            )
