"""Observe what torch does: waits for collectives, work on a GPU's stream, memory, graph breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # no public way to see operators

from hpc_train.step_clock import DeviceClock, StepClock

if TYPE_CHECKING:
    from torch._ops import OpOverload

Operator: TypeAlias = "OpOverload[..., Any]"
"""Type of an operator that a TorchDispatchMode sees; it has no public name."""


def watch_waits(clock: StepClock, device: torch.device, compiled: bool) -> Callable[[], None]:
    """Tell the clock of every wait for a collective in Python; returns what undoes it.

    torch has no hook that sees waits of all backends, and its flight recorder sees NCCL alone. Pipelines and this
    project wait by Work.wait, DTensor by wait_tensor, and fully_shard by Work.wait on CPUs and by Stream.wait_event on
    GPUs. device: of this rank. compiled: leave wait_tensor alone, because torch.compile traces into it; waits inside
    compiled blocks are then counted as computation.
    """
    undo = [_time_calls(dist.Work, "wait", clock)]
    if not compiled:
        undo.append(_time_calls(dist._functional_collectives, "wait_tensor", clock))
    if device.type == "cuda":
        undo.append(_time_calls(torch.cuda.Stream, "wait_event", clock, caller="torch.distributed.fsdp."))

    def undo_all() -> None:
        for restore in undo:
            restore()

    return undo_all


def _time_calls(target: Any, name: str, clock: StepClock, caller: str = "") -> Callable[[], None]:
    """Have the clock time every call of a function that waits for a collective; returns what undoes it.

    caller: count only calls from modules whose names begin so. Streams also wait for copies.
    """
    wait = getattr(target, name)

    def timed_wait(*arguments: Any, **named: Any) -> Any:
        if caller and not sys._getframe(1).f_globals.get("__name__", "").startswith(caller):
            return wait(*arguments, **named)
        started = clock.begin_wait()
        try:
            return wait(*arguments, **named)
        finally:
            clock.end_wait(started)

    setattr(target, name, timed_wait)
    return lambda: setattr(target, name, wait)


def make_device_clock() -> DeviceClock:
    """Make the clock of a rank whose computation goes to the current stream of its GPU."""
    computation, training_thread = torch.cuda.current_stream(), get_ident()

    def is_training_work() -> bool:
        # Backward runs in a thread of autograd, in the stream of the forward. The threads of saves wait for collectives
        # of their own. Private because torch has no public way to ask whether a thread runs a backward.
        thread = get_ident() == training_thread or torch._C._current_graph_task_id() != -1
        on_stream = thread and torch.cuda.current_stream() == computation
        return on_stream and not torch.cuda.is_current_stream_capturing()

    return DeviceClock(partial(torch.cuda.Event, enable_timing=True), is_training_work)


def record_memory_history(active: bool) -> None:
    """Begin or end recording what the allocator of this process's GPU does. torch has no public way."""
    torch.cuda.memory._record_memory_history("all" if active else None)


def write_memory_snapshot(path: Path) -> None:
    """Write what was recorded, in the format of https://pytorch.org/memory_viz. torch has no public way."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def graph_breaks() -> dict[str, int]:
    """Return why torch.compile left code of this process uncompiled, with counts since the process began.

    Code that hit the recompilation limit counts too. Private because torch only logs this, and logs graph breaks only
    if TORCH_LOGS asks for them.
    """
    from torch._dynamo.utils import counters  # takes most of a second, and only compiled runs need it

    unimplemented = counters["unimplemented"].items()
    limits = {reason: count for reason, count in unimplemented if reason.startswith("Dynamo recompile limit")}
    return {**counters["graph_break"], **limits}
