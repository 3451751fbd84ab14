"""Recompute a block only once for a backward that is split in two parts; both parts read what that run saved.

A pipeline that splits backward (Qi et al. 2024, arXiv:2401.10241) first computes the gradients of a stage's inputs and
later those of its weights, by a call of autograd for each group of weights. torch's checkpoint would run a block again
in each of these calls. Here the first call runs it, and what it saves stays until the micro-batch's graph is freed. So
between the two parts a micro-batch holds as much memory as without recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpc_train.parallel.user_model import Forward


def recompute_once(forward: Forward, *arguments: Any, **named: Any) -> Any:
    """Call `forward`, saving only its arguments for backward."""
    run = _BlockRun(forward, arguments, named)
    with saved_tensors_hooks(run.count, run.take):
        return forward(*arguments, **named)


class _BlockRun:
    """One forward of a block: saved tensors are numbered in the first run, and kept in the second."""

    def __init__(self, forward: Forward, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._forward, self._arguments, self._named = forward, arguments, named
        self._random = _RandomState(arguments)
        self._count = 0
        self._saved: list[Tensor] | None = None

    def count(self, tensor: Tensor) -> int:
        """Return the number of a tensor that the first run would save."""
        self._count += 1
        return self._count - 1

    def take(self, number: int) -> Tensor:
        """Return the tensor of this number, after the second run."""
        if self._saved is None:
            self._saved = self._run_again()
            self._arguments, self._named = (), {}
        return self._saved[number]

    def _run_again(self) -> list[Tensor]:
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            saved.append(tensor.detach())  # a result that its own node saves would otherwise keep that node alive

        with self._random.restored(), torch.enable_grad(), saved_tensors_hooks(keep, _refuse_backward):
            self._forward(*self._arguments, **self._named)
        assert len(saved) == self._count, "a block saved other tensors when it ran again"
        return saved


def _refuse_backward(_: object) -> Never:
    raise AssertionError("nothing runs backward through the second forward")


class _RandomState:
    """The state of the generators from which layers of a user's model draw their dropout."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._devices = sorted(
            {argument.device.index for argument in arguments if isinstance(argument, Tensor) and argument.is_cuda}
        )
        self._host = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the same again inside; afterwards the generators are as they were before."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._host)
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
