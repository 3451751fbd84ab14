"""Break a run on purpose, to see whether it survives: orders to its ranks, and how a rank obeys one.

`hpc-train chaos` writes orders as files into RUN/chaos. Each rank of a run with resilience.chaos=true looks there once
a step and obeys those that are for it. An order is renamed before it is obeyed, so that no restart obeys it again.
Faults of machines (power, cables, disks) are not offered: only an administrator can make those.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.regular_files import read_json

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

FOLDER = "chaos"
"""Folder of a run directory that orders lie in."""
KINDS = {
    "kill": "SIGKILL to the rank",
    "stop": "SIGSTOP to the rank",
    "gil": "the rank takes the interpreter's lock and never gives it back",
    "exception": "the rank raises RuntimeError",
    "slow": "the rank sleeps for `seconds` in one step",
    "busy": "processes keep the rank's CPUs busy for `seconds`",
    "nan": "what the rank's modules return is NaN in one step",
    "flip_gradient": "one bit of a gradient of the rank flips in one step, after ranks have averaged them",
    "flip_weight": "one bit of a parameter of the rank flips",
}
_BUSY = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
_FLIPPED_BIT = 30
"""Bit of a float32 that is flipped: the highest of the exponent, so that the value becomes huge or tiny."""


@dataclass(frozen=True)
class Order:
    """One fault that a rank is to make."""

    kind: str
    rank: int
    step: int = 0
    """Not before so many steps are made."""
    seconds: float = 30.0
    """How long `slow` and `busy` last."""


def give_order(run: Path, order: Order) -> Path:
    """Write an order for a rank; returns its file, which the rank renames to `.obeyed`."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    number = sum(1 for _ in folder.iterdir())
    path = folder / f"{number:06d}.{order.rank}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(order)) + "\n")
    # Renamed when complete: a rank never reads half an order.
    beside.replace(path)
    return path


class FaultInjector:
    """Runs in each rank: reads the orders that `hpc-train chaos` writes, and injects the faults."""

    def __init__(self, run: Path, rank: int) -> None:
        self._folder, self._rank = run / FOLDER, rank
        self._hooks: list[RemovableHandle] = []
        self._flips = False

    def before_step(self, step: int, parts: Iterable[torch.nn.Module]) -> None:
        """Inject the faults that are due. step: steps made so far. parts: this rank's parts of the model."""
        for order in self._take_orders(step):
            if order.kind == "nan":
                self._hooks += [
                    module.register_forward_hook(_return_nan)
                    for part in parts
                    for module in part.modules()
                    # Only the innermost modules: a container returns what one of them has returned.
                    if not list(module.children())
                ]
            elif order.kind == "flip_gradient":
                self._flips = True
            elif order.kind == "flip_weight":
                _flip_bit(next(_list_parameters(parts)))
            else:
                _obey(order)

    def after_backward(self, parts: Iterable[torch.nn.Module]) -> None:
        """Spoil a gradient of this step, if that was ordered, and end what was ordered for its forward."""
        if self._flips:
            _flip_bit(next(found.grad for found in _list_parameters(parts) if found.grad is not None))
        while self._hooks:
            self._hooks.pop().remove()
        self._flips = False

    def _take_orders(self, step: int) -> list[Order]:
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.name.endswith(f".{self._rank}.json"))
        except FileNotFoundError:
            return []
        found = []
        for path in paths:
            order = Order(**read_json(path))
            if order.step <= step:
                # Before the fault, since the rank may not live to do it afterwards.
                path.replace(path.with_suffix(".obeyed"))
                found.append(order)
        return found


def _obey(order: Order) -> None:
    if order.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if order.kind == "kill" else signal.SIGSTOP)
    elif order.kind == "gil":
        ctypes.PyDLL(None).sleep(1 << 30)  # PyDLL: without giving up the lock
    elif order.kind == "exception":
        raise RuntimeError("ordered by hpc-train chaos")
    elif order.kind == "slow":
        time.sleep(order.seconds)
    elif order.kind == "busy":
        for _ in os.sched_getaffinity(0):
            # In a session of their own, so that they outlive the rank, as a stranger's processes would.
            subprocess.Popen([sys.executable, "-S", "-c", _BUSY, str(order.seconds)], start_new_session=True)


def _list_parameters(parts: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    return (parameter for part in parts for parameter in part.parameters())


def _return_nan(_module: torch.nn.Module, _inputs: object, output: Any) -> Any:
    """Hook of a module: spoil what it returns, where that has a gradient."""
    return output * float("nan") if getattr(output, "requires_grad", False) else output


def _flip_bit(tensor: torch.Tensor) -> None:
    """Flip the highest exponent bit of the first number, in place."""
    import torch

    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # The top bit is the sign and the one below it the highest of the exponent, in bfloat16, float16, float32 and
    # float64 alike. Counted from the lowest bit, it moves with the width.
    bit = _FLIPPED_BIT + 8 * tensor.element_size() - 32
    first = _local(tensor).view(-1)[:1].view(integer)
    first ^= 1 << bit


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, to be changed in place."""
    data = tensor.detach()
    return data.to_local() if hasattr(data, "to_local") else data
