"""Break a run on purpose, to see whether it survives: orders to its ranks, and how a rank obeys one.

`hpc-train chaos` writes orders as files into RUN/chaos. Each rank of a run with resilience.chaos=true looks there once
per step, and once before the ranks meet, and obeys those that are for it. An order is renamed before it is obeyed, so
that no restart obeys it again. Faults of machines (power, cables) are not offered: only an administrator can make
those. A slow or full disk is one for the rank alone.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.regular_files import read_json, write_private_file

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from hpc_train.interfaces import TensorShard

log = logging.getLogger(__name__)
FOLDER = "chaos"
"""Folder of a run directory that orders lie in."""
KINDS = {
    "kill": "SIGKILL to the rank",
    "stop": "SIGSTOP to the rank",
    "gil": "the rank takes Python's global lock and never releases it",
    "exception": "the rank raises RuntimeError",
    "slow": "the rank sleeps for `seconds` in one step",
    "busy": "processes keep the rank's CPUs busy for `seconds`",
    "nan": "the outputs of the rank's modules are NaN in one step",
    "flip_gradient": "one bit of a gradient of the rank flips in one step, after ranks have averaged them",
    "flip_weight": "one bit of a parameter of the rank flips",
    "flip_moment": "one bit of the optimizer's state of the rank flips",
    "slow_disk": "the rank's part of the next checkpoint takes `seconds` longer to write",
    "full_disk": "all that the rank writes to files fails for `seconds`, as on a full disk",
    "rendezvous": "the rank hangs at the next start of the ranks, and never joins the others",
}
AT_START = "rendezvous"
"""The kind that is obeyed before the ranks meet; all others are obeyed before a step."""
LASTING_KINDS = ("slow", "busy", "slow_disk", "full_disk")
"""The kinds that last for `seconds`."""
_BUSY = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
_FLIPPED_BIT = 30
"""Bit of a float32 that is flipped: the highest of the exponent, so that the value becomes huge or tiny."""


@dataclass(frozen=True)
class Order:
    """One fault that a rank is to make."""

    kind: str
    rank: int
    step: int = 0
    """Number of steps that must be made before it."""
    seconds: float = 30.0
    """How long `slow`, `busy`, `slow_disk` and `full_disk` last."""


def give_order(run: Path, order: Order) -> Path:
    """Write an order for a rank; returns its file, which the rank renames to `.obeyed`."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    number = sum(1 for _ in folder.iterdir())
    path = folder / f"{number:06d}.{order.rank}.json"
    write_private_file(path, json.dumps(asdict(order)) + "\n")
    return path


class FaultInjector:
    """Runs in each rank: reads the orders that `hpc-train chaos` writes, and injects the faults."""

    def __init__(self, run: Path, rank: int) -> None:
        self._folder, self._rank = run / FOLDER, rank
        self._hooks: list[RemovableHandle] = []
        self._flips = False
        self._slow_seconds = 0.0

    def before_meeting(self) -> None:
        """Wait for ever if that was ordered. Called before this rank meets the others; rank: the number of its task."""
        if self._take_orders(0, (AT_START,)):
            while True:
                time.sleep(1)

    def before_step(
        self,
        step: int,
        parts: Iterable[torch.nn.Module],
        list_shards: Callable[[], Iterable[TensorShard]] = tuple,
    ) -> None:
        """Inject the faults that are due.

        step: steps made so far. parts: this rank's parts of the model. list_shards: lists what the rank saves.
        """
        for order in self._take_orders(step, [kind for kind in KINDS if kind != AT_START]):
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
            elif order.kind == "flip_moment":
                _flip_largest_moment(list_shards())
            elif order.kind == "slow_disk":
                self._slow_seconds = order.seconds
            else:
                _obey(order)

    def after_backward(self, parts: Iterable[torch.nn.Module]) -> None:
        """Spoil a gradient of this step, if that was ordered, and end what was ordered for its forward."""
        if self._flips:
            _flip_bit(next(parameter.grad for parameter in _list_parameters(parts) if parameter.grad is not None))
        while self._hooks:
            self._hooks.pop().remove()
        self._flips = False

    def before_write(self) -> None:
        """Take as long as a slow disk would, if that was ordered. Called in the thread that writes a checkpoint."""
        seconds, self._slow_seconds = self._slow_seconds, 0.0
        time.sleep(seconds)

    def _take_orders(self, step: int, kinds: Collection[str]) -> list[Order]:
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.name.endswith(f".{self._rank}.json"))
        except FileNotFoundError:
            return []
        orders = []
        for path in paths:
            order = Order(**read_json(path))
            if order.step <= step and order.kind in kinds:
                # Before the fault, since the rank may not live to do it afterwards.
                path.replace(path.with_suffix(".obeyed"))
                orders.append(order)
        return orders


def _obey(order: Order) -> None:
    if order.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if order.kind == "kill" else signal.SIGSTOP)
    elif order.kind == "gil":
        hold_interpreter_lock()
    elif order.kind == "exception":
        raise RuntimeError("ordered by hpc-train chaos")
    elif order.kind == "slow":
        time.sleep(order.seconds)
    elif order.kind == "full_disk":
        _fail_writes(order.seconds)
    elif order.kind == "busy":
        for _ in os.sched_getaffinity(0):
            # In a session of their own, so that they outlive the rank, as a stranger's processes would.
            subprocess.Popen([sys.executable, "-S", "-c", _BUSY, str(order.seconds)], start_new_session=True)


def hold_interpreter_lock() -> None:
    """Never return, and never release the interpreter's lock.

    A sleep would end at the first signal, which is the one that asks a seemingly hanging rank for its stacks. Waiting
    for a mutex that this thread itself has locked does not end.
    """
    library = ctypes.PyDLL(None)  # of a PyDLL: its functions run without giving up the lock
    mutex = ctypes.create_string_buffer(128)  # a pthread_mutex_t of zeros is an unlocked one
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _fail_writes(seconds: float) -> None:
    """Let every write of this process to a file fail with EFBIG for `seconds`; Python ignores the signal SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    timer.daemon = True
    timer.start()


def _list_parameters(parts: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    return (parameter for part in parts for parameter in part.parameters())


def _return_nan(_module: torch.nn.Module, _inputs: object, output: Any) -> Any:
    """Hook of a module: spoil what it returns, where that has a gradient."""
    return output * float("nan") if getattr(output, "requires_grad", False) else output


def _flip_largest_moment(shards: Iterable[TensorShard]) -> None:
    """Flip a bit of the largest number of the optimizer's first state: others are lost where updates are rounded."""
    for shard in shards:
        if shard.name.startswith("optim.") and shard.local.is_floating_point() and shard.local.numel() > 1:
            numbers = _local(shard.local).view(-1)
            largest = int(numbers.abs().argmax())
            _flip_bit(numbers[largest : largest + 1])
            return
    log.warning("chaos: the optimizer has no state yet, so no bit of it flips")


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
