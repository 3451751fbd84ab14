"""List, create and set the state of any torch optimizer, by the names of its parameters.

torch numbers parameters by their order in the optimizer. Here the state of parameter `w` is named
`optim.<key>.w`, as in the checkpoints of `hpc-train train`, so that it can be split and arranged in any way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpc_train.checkpoint.wrapped_optimizers import unwrap_optimizers
from hpc_train.errors import UserError

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

_HOW_IT_RUNS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group that a load leaves alone: the parameters, and how the update is computed."""
_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class StateValue:
    """One value of the state of a parameter."""

    name: str
    """optim.<key>.<parameter>"""
    tensor: Tensor
    """The value itself, or a copy of a number as a tensor without dimensions."""
    state: dict[str, Any]
    key: str

    def write_back(self) -> None:
        """Set the number that `tensor` is a copy of; a tensor of the optimizer has been changed in place."""
        if isinstance(self.state[self.key], _NUMBERS):
            self.state[self.key] = self.tensor.item()


class NamedOptimizers:
    """One or more optimizers over parameters that have names."""

    def __init__(self, optimizers: Optimizers, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises UserError for an object that is no optimizer, or a parameter that is not the model's or has two."""
        self._optimizers, self._outer_groups = unwrap_optimizers(optimizers)
        names = {parameter: name for name, parameter in parameters.items()}
        self._owner: dict[str, tuple[Optimizer, nn.Parameter]] = {}
        self._group_of: dict[str, int] = {}
        self._groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        owners = [optimizer for optimizer in self._optimizers for _ in optimizer.param_groups]
        for number, (optimizer, group) in enumerate(zip(owners, self._groups, strict=True)):
            for parameter in group["params"]:
                if parameter not in names:
                    raise UserError(
                        f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
                        "not in model=; make the optimizer after the model is split, and give all modules, a parameter "
                        "without one in an nn.ParameterList"
                    )
                name = names[parameter]
                if name in self._owner:
                    raise UserError(f"parameter {name!r} belongs to two groups of the optimizers")
                self._owner[name], self._group_of[name] = (optimizer, parameter), number

    def list_values(self) -> Iterator[StateValue]:
        """List the state of all parameters, numbers as tensors. Raises UserError for state that cannot be split."""
        for name, (optimizer, parameter) in self._owner.items():
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if value is None:
                    continue
                yield StateValue(f"optim.{key}.{name}", _make_tensor(key, name, value, parameter), state, key)

    def describe_groups(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of every group, and the names of its parameters on this rank."""
        described = []
        for number, group in enumerate(self._outer_groups):
            values = {key: _make_plain(value) for key, value in group.items() if key not in _HOW_IT_RUNS}
            names = [name for name, group_number in self._group_of.items() if group_number == number]
            described.append({"values": values, "parameters": names})
        return described

    def restore_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyperparameters that `describe_groups` returned."""
        for group, outer, described in zip(self._groups, self._outer_groups, saved, strict=True):
            for one in (group,) if outer is group else (group, outer):
                _restore_values(one, described["values"])

    def check_groups(self, saved: Sequence[Mapping[str, Any]], where: str) -> None:
        """Raise UserError if the groups are others than those of the checkpoint."""
        if len(saved) != len(self._groups):
            raise UserError(
                f"{where} was saved with {len(saved)} parameter groups, this optimizer has {len(self._groups)}; "
                "make them as they were, or leave optimizer= out"
            )
        for number, described in enumerate(saved):
            for name in described["parameters"]:
                if self._group_of.get(name, number) != number:
                    raise UserError(
                        f"{where}: parameter {name!r} was saved in group {number} of the optimizer, here it is in "
                        f"group {self._group_of[name]}; make the groups as they were, or leave optimizer= out"
                    )

    def match_state(self, saved_names: Sequence[str]) -> None:
        """Make sure that every parameter has the state entries that the checkpoint has; their values do not matter.

        torch creates the state at the first step, so a fresh optimizer makes one step with a learning rate and
        gradients of 0. Raises UserError if that does not create it.
        """
        keys: dict[str, set[str]] = defaultdict(set)
        for saved in saved_names:
            _, key, name = saved.split(".", 2)
            keys[name].add(key)
        missing: set[nn.Parameter] = set()
        for name, (optimizer, parameter) in self._owner.items():
            if not keys[name]:
                optimizer.state.pop(parameter, None)
            elif any(optimizer.state.get(parameter, {}).get(key) is None for key in keys[name]):
                missing.add(parameter)
        if missing:
            for optimizer in self._optimizers:
                _make_state(optimizer, missing)
        for name, (optimizer, parameter) in self._owner.items():
            state = optimizer.state.get(parameter, {})
            for key in keys[name] - state.keys():
                raise UserError(
                    f"the checkpoint has optimizer state {key!r} of {name!r}, which {type(optimizer).__name__} does "
                    "not make; use the optimizer that it was saved with, or leave optimizer= out"
                )
            for key in keys[name]:
                if state[key] is None:  # such as the momentum of SGD, which its first step makes
                    state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for key in state.keys() - keys[name]:
                if state[key] is not None:
                    raise UserError(
                        f"the checkpoint has no optimizer state {key!r} of {name!r}, which {type(optimizer).__name__} "
                        "needs; use the optimizer that it was saved with, or leave optimizer= out"
                    )


def _make_tensor(key: object, name: str, value: object, parameter: nn.Parameter) -> Tensor:
    if isinstance(value, _NUMBERS) and isinstance(key, str) and "." not in key:
        kind = {bool: torch.bool, int: torch.int64}.get(type(value), torch.float64)
        return torch.tensor(value, dtype=kind)
    if not isinstance(value, Tensor) or not isinstance(key, str) or "." in key:
        raise UserError(
            f"optimizer state {key!r} of {name!r} is a {type(value).__name__}; only tensors and numbers can be saved, "
            "and in one process anything else through extra={'optimizer': optimizer.state_dict()}"
        )
    # One element, such as a step count, is the same on all ranks; more could be of any part.
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise UserError(
            f"optimizer state {key!r} of {name!r} is a plain tensor, but the parameter is split: which part of the "
            "whole the state is cannot be known; use an optimizer that makes its state like its parameters (zeros_like)"
        )
    return value


def _make_plain(value: Any) -> Any:
    """Return a hyperparameter as JSON has it."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _restore_values(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) and isinstance(current, tuple) else value


def _make_state(optimizer: Optimizer, missing: set[nn.Parameter]) -> None:
    """Make the state of the parameters in `missing` by a step with a rate and gradients of 0; the others are left out.

    The values of their state are of no use afterwards, because a load overwrites them. Gradients stay as they were.
    Raises UserError if that step fails.
    """
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for parameter in group["params"]:
                parameter.grad = _make_zero_gradient(optimizer, parameter) if parameter in missing else None
        optimizer.step()
    except Exception as error:  # of a user's own optimizer, or one that needs a closure
        raise UserError(
            f"{type(optimizer).__name__} cannot make its state before a load, by a step with gradients of 0 "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); make one step before the load, which "
            "overwrites all of it, or leave optimizer= out"
        ) from error
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate


def _make_zero_gradient(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
    """Make a gradient of 0; SparseAdam refuses one that is not sparse."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros_like(parameter, layout=torch.sparse_coo)
    return torch.zeros_like(parameter)
