"""Stop a user's own training loop at a step boundary, on all ranks together, before Slurm ends the job."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from hpc_train.errors import EXIT_REQUEUE, UserError
from hpc_train.runtime.consensus import report_lost_ranks
from hpc_train.runtime.stop_request import STOP_SIGNALS, StopRequest, unblock_stop_signals

_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)
_END_TIME = "SLURM_JOB_END_TIME"


class Preemption:
    """Inside this context, a signal or the time limit asks the loop to stop instead of ending the process.

        with hpc_train.Preemption() as preemption:
            for step in range(first, steps):
                ...
                if preemption.should_stop():
                    checkpointer.save(step + 1, ...)
                    preemption.requeue()

    The signals are SIGTERM (Slurm's preemption), SIGUSR1 and SIGUSR2 (what `sbatch --signal` may ask for).
    """

    def __init__(self, *, seconds_before_limit: float = 120.0, env: Mapping[str, str] = os.environ) -> None:
        """seconds_before_limit: ask to stop this long before the time limit, which Slurm gives in SLURM_JOB_END_TIME.

        Raises UserError if that is not a time.
        """
        self._request = StopRequest()
        self._before: dict[signal.Signals, Any] = {}
        # By the monotonic clock from here on: the other one may be set while the loop runs.
        self._stop_at = time.monotonic() + _read_end_time(env) - time.time() - seconds_before_limit

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop: the name of a signal, "time limit", or None. Other ranks may have another."""
        return self._request.signal_name

    def should_stop(self) -> bool:
        """Return whether any rank was asked to stop: the same on all ranks. A collective, for the end of each step."""
        if time.monotonic() >= self._stop_at:
            self._request.ask("time limit")
        stop = torch.tensor(int(self._request.requested), dtype=torch.uint8)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # A user's group may be of NCCL alone, which takes no CPU tensors.
            if torch.cuda.is_available() and "cpu:" not in dist.get_backend_config():
                stop = stop.to(torch.device("cuda", torch.cuda.current_device()))
            with report_lost_ranks():
                dist.all_reduce(stop, dist.ReduceOp.MAX)
        return bool(stop.item())

    def requeue(self, marker: str | Path | None = None) -> NoReturn:
        """End this rank with exit code 75: stopped on purpose, saved, to be run again. All ranks call it.

        The batch script requeues on that code. marker: a file that rank 0 makes first, for launchers that replace the
        exit code, as torchrun does.
        """
        if dist.is_available() and dist.is_initialized():
            rank = dist.get_rank()
            with report_lost_ranks():
                dist.barrier()  # a launcher may end the other ranks as soon as one has ended
        else:
            rank = 0
        if marker is not None and rank == 0:
            Path(marker).touch()
        raise SystemExit(EXIT_REQUEUE)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise UserError("Preemption: signals come to the main thread alone; enter it there")

        def note(number: int, _frame: FrameType | None) -> None:
            self._request.ask(signal.Signals(number).name)

        for number in _SIGNALS:
            self._before[number] = signal.signal(number, note)
        unblock_stop_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()


def _read_end_time(env: Mapping[str, str]) -> float:
    text = env.get(_END_TIME)
    if text is None:
        return float("inf")
    if not text.isdecimal() or len(text) > 12:
        raise UserError(f"{_END_TIME}={text[:40]!r} is not a time in seconds since 1970; unset it")
    return float(text)
