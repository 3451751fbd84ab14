"""Act on a stop signal in a job of callables: save what is to be called next and requeue the job, or end it.

A preempted job always goes on; one that is out of time only as often as was asked for.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from hpc_train.errors import EXIT_REQUEUE
from hpc_train.launch.callables import calls
from hpc_train.launch.callables.calls import save_pickle
from hpc_train.launch.slurm.supervisor.time_limit import SLURM_EARLY_SECONDS, read_time_left
from hpc_train.runtime.stop_request import STOP_SIGNALS, StopRequest

SIGNAL_SECONDS_VARIABLE = "HPC_TRAIN_SIGNAL_SECONDS"
"""Environment variable: seconds before the time limit at which the job is told to stop."""
_START_SECONDS = 2.0
"""Seconds that the local pool counts before this rank does: it starts the clock before Python has started."""


def requeue_marker_name(job_id: str) -> str:
    """Name of the file that asks the batch script to requeue the job."""
    return f"{job_id}_requeue"


def write_requeue_marker(env: JobEnvironment) -> None:
    """Ask for the job to be requeued."""
    if env.global_rank == 0:
        (env.paths.folder / requeue_marker_name(env.job_id)).touch(0o600)


class StopSignalHandler:
    """Acts on the stop signals of one rank."""

    def __init__(self, env: JobEnvironment, delayed: DelayedSubmission) -> None:
        self._env, self._delayed = env, delayed
        self._start, self._ignores_signals = time.monotonic(), False

    def install(self, early: StopRequest) -> None:
        """Handle the signals from now on, and one that came `early` at once. Ctrl-C is Python's own again."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle_signal)
        numbers = {number.name: number for number in STOP_SIGNALS}
        if early.signal_name in numbers:
            self._handle_signal(numbers[early.signal_name], None)

    def ignore_signals(self) -> None:
        """Ignore stop signals from now on: the call is over."""
        self._ignores_signals = True

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._ignores_signals:
            return
        print(f"hpc_train: {signal.Signals(number).name}", flush=True)
        if self._env.global_rank == 0:
            self._ignores_signals = True
            self._save_and_leave()
        elif number == signal.SIGTERM:  # rank 0 has it, too, or has ended
            raise SystemExit(128 + number)

    def _save_and_leave(self) -> None:
        """Save the next call and leave by SystemExit with the code of a requeue; else raise UncompletedJobError."""
        timed_out = self._is_out_of_time()
        timeouts_left = self._delayed._timeout_countdown - timed_out
        if timeouts_left < 0:
            raise UncompletedJobError("Job not requeued because: timed-out too many times.")
        following: DelayedSubmission | None = self._delayed
        if calls.can_resume(self._delayed.function):
            following = calls.choose_next_call(self._delayed)
        elif timed_out:
            raise UncompletedJobError("Job not requeued because: timed-out and not checkpointable.")
        if following is None:
            raise UncompletedJobError("Job not requeued because: checkpoint function returned None.")
        paths = self._env.paths
        following._timeout_min, following._timeout_countdown = self._delayed._timeout_min, timeouts_left
        save_pickle(following, paths.submitted_pickle)
        write_requeue_marker(self._env)
        print(f"hpc_train: to be run again ({timeouts_left} remaining timeouts)", flush=True)
        raise SystemExit(EXIT_REQUEUE)

    def _is_out_of_time(self) -> bool:
        """Whether the signal came because of the time limit. The same one comes at a preemption, at any time."""
        notice = float(os.environ.get(SIGNAL_SECONDS_VARIABLE, "90"))
        if self._env.cluster != "slurm":
            limit = float(os.environ.get("SUBMITIT_LOCAL_TIMEOUT_S") or "0")
            return limit > 0 and time.monotonic() - self._start >= limit - notice - _START_SECONDS
        seconds_left = read_time_left(self._env.job_id)
        if seconds_left is None:
            seconds_left = 60.0 * self._delayed._timeout_min - (time.monotonic() - self._start)
        return seconds_left <= notice + SLURM_EARLY_SECONDS
