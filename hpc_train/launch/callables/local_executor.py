"""Run callables as processes of this machine: submitit's local executor with a limit on the jobs at a time.

All ranks of a job are seen as one process, which is what submitit's LocalJob asks for. Polling a job drives it:
nothing runs in the background.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor, LocalJob

from hpc_train.errors import UserError
from hpc_train.launch.callables.calls import (
    ELEMENT_VARIABLE,
    SHARED_CALL_VARIABLE,
    make_private_folder,
    make_worker_command,
    pickle_value,
)
from hpc_train.launch.callables.stop_signals import SIGNAL_SECONDS_VARIABLE, requeue_marker_name
from hpc_train.launch.local.node_sharing import list_visible_gpus, make_gpu_share_environment
from hpc_train.launch.local.process_pool import ProcessPool
from hpc_train.regular_files import write_private_file
from hpc_train.runtime.stop_request import block_stop_signals


def count_fitting_jobs(ranks: int, gpus: int | None, visible: Sequence[str] = ()) -> int:
    """Return how many jobs fit at the same time: on the GPUs, if they ask for some, else on this process's cores.

    ranks, gpus: of one job; gpus None: every job sees all. visible: the GPUs that are shared out; (): those that this
    process sees. Raises UserError if not one job fits.
    """
    if gpus is None:
        return max(1, len(os.sched_getaffinity(0)) // ranks)
    visible = visible or list_visible_gpus()
    if gpus > len(visible):
        raise UserError(f"a job asks for {gpus} GPUs, and {len(visible)} are visible here; ask for fewer, or for none")
    return len(visible) // gpus


class LocalCallExecutor(LocalExecutor):
    """submitit's local executor: its jobs wait their turn, and end with the process that submitted them."""

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        at_once: int | None = None,
        max_attempts: int = 100,
    ) -> None:
        """at_once: maximum number of jobs that run at the same time; None: as many as fit."""
        super().__init__(folder, max_num_timeout, max_pickle_size_gb, python)
        self._at_once, self._max_attempts = at_once, max_attempts
        self._pool = ProcessPool(at_once or 1, _start_unless_cancelled)
        self._throttling = 0.0  # submitit sleeps so long between two jobs, by default 0.2 s

    @classmethod
    def name(cls) -> str:
        """Return submitit's name of its own executor: jobs find the environment of that."""
        return "local"

    @property
    def _submitit_command_str(self) -> str:
        return make_worker_command(self.python, self.folder)

    @property
    def ranks(self) -> int:
        """Number of processes of a job."""
        return int(self.parameters.get("tasks_per_node", 1))

    @property
    def _chosen_gpus(self) -> list[str]:
        return [str(gpu) for gpu in self.parameters.get("visible_gpus", ())]

    def submit_elements(self, call: Callable[[], Any], count: int) -> list[LocalJob[Any]]:
        """Queue `count` jobs that share one pickle of `call`; in each, calls.array_element() tells its index."""
        data = self._pickle_call(DelayedSubmission(call))
        base = _new_job_id()
        shared = JobPaths(self.folder, base).submitted_pickle
        write_private_file(shared, data)
        return [
            self._queue_job(f"{base}{index:06d}", {ELEMENT_VARIABLE: str(index), SHARED_CALL_VARIABLE: str(shared)})
            for index in range(count)
        ]

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        jobs = []
        for data in [self._pickle_call(delayed) for delayed in delayed_submissions]:
            job_id = f"{_new_job_id()}000000"
            paths = JobPaths(self.folder, job_id)
            make_private_folder(paths.folder)
            write_private_file(paths.submitted_pickle, data)
            jobs.append(self._queue_job(job_id, {}))
        return jobs

    def _pickle_call(self, delayed: DelayedSubmission) -> bytes:
        delayed.set_timeout(self.parameters.get("timeout_min", 5), self.max_num_timeout)
        return pickle_value(delayed)

    def _queue_job(self, job_id: str, environment: Mapping[str, str]) -> LocalJob[Any]:
        self._pool.slots = self._count_parallel_jobs()
        process = JobProcesses(self._make_program(environment), job_id, self._advance_pool)
        self._pool.waiting.append(process)
        self._advance_pool()
        tasks = list(range(self.ranks))
        return LocalJob(self.folder, job_id, tasks, process)  # type: ignore[arg-type]

    def _advance_pool(self) -> None:
        """Start the jobs that wait, in the place of those that have ended. Polling any job calls this."""
        self._pool.remove_ended()
        self._pool.start_waiting()

    def _count_parallel_jobs(self) -> int:
        gpus = self.parameters.get("gpus_per_node")
        fitting = count_fitting_jobs(self.ranks, gpus, self._chosen_gpus)
        if gpus is None:  # cores can be shared
            return self._at_once or fitting
        return min(self._at_once or fitting, fitting)

    def _make_program(self, environment: Mapping[str, str]) -> JobProgram:
        get = self.parameters.get
        seconds, notice = 60.0 * get("timeout_min", 2.0), get("signal_delay_s", 30)
        variables = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(self.ranks),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": f"{seconds:g}",
            SIGNAL_SECONDS_VARIABLE: str(notice),
        }
        return JobProgram(
            self._submitit_command_str,
            self.folder,
            {**os.environ, **variables, **get("environment", {}), **environment},
            self.ranks,
            get("setup", ()),
            seconds,
            notice,
            self._max_attempts,
            get("stderr_to_stdout", False),
            self._chosen_gpus,
            get("gpus_per_node"),
        )


def _new_job_id() -> str:
    """Return a number that no job of this folder has had: the microseconds since the epoch."""
    return str(time.time_ns() // 1000)


@dataclass(frozen=True)
class LocalJobs:
    """The ends of local jobs, for wait_for_jobs."""

    jobs: Mapping[str, LocalJob[Any]]
    grace: float = 0.0

    def find_ends(self, jobs: Collection[str], urgent: bool) -> Mapping[str, str]:
        """Return how the jobs ended that have; every end is known at once, so that `urgent` changes nothing."""
        codes = {job: self.jobs[job]._process.poll() for job in jobs}  # type: ignore[union-attr]
        return {job: _describe_code(code) for job, code in codes.items() if code is not None}


def _describe_code(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


_NEVER = float("inf")
_GRACE_SECONDS = 2.0
"""Seconds that the other ranks have when one has failed, and all of them when they are to end."""


@dataclass(frozen=True)
class JobProgram:
    """The program of a job, which each of its ranks runs."""

    command: str
    folder: Path
    environment: Mapping[str, str]
    ranks: int = 1
    setup: Sequence[str] = ()
    seconds: float = 0.0
    """Time limit; 0: none."""
    notice: float = 0.0
    """Seconds before it at which the ranks are asked to stop; never, if that is before they start."""
    max_attempts: int = 1
    one_log: bool = False
    gpus: Sequence[str] = ()
    """The GPUs that are shared out over the slots; (): those that this process sees."""
    gpus_per_job: int | None = None
    """None: every job sees what this process sees."""

    def words(self) -> list[str]:
        if not self.setup:
            return shlex.split(self.command)
        return ["bash", "-c", "\n".join(["set -e", *self.setup, "set +e", f"exec {self.command}"])]

    def gpu_environment(self, slot: int) -> dict[str, str]:
        """Return the environment variable with the GPUs of the job in this slot."""
        if self.gpus_per_job is None:
            return {}
        return make_gpu_share_environment(slot, self.gpus_per_job, self.gpus or list_visible_gpus(), os.environ)


def _start_unless_cancelled(job: JobProcesses, slot: int) -> JobProcesses | None:
    if job.has_ended():
        return None
    job.start(slot)
    return job


class JobProcesses:
    """The ranks of one job, which look like one process to submitit's LocalJob. Polling the job drives it."""

    def __init__(self, program: JobProgram, job_id: str, advance_pool: Callable[[], None]) -> None:
        self._program, self._job_id, self._advance_pool = program, job_id, advance_pool
        self._slot = -1
        self._attempt = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._code: int | None = None
        self._failed: int | None = None
        self._cancelled = self._asked_to_stop = False
        self._deadline = self._kill_at = _NEVER

    @property
    def pid(self) -> int:
        """Process id of the first rank; 0 before it started."""
        return self._processes[0].pid if self._processes else 0

    def poll(self) -> int | None:
        """Return the exit code of the first rank that failed, -n where signal n ended it; None: not ended."""
        self._advance_pool()
        return self.poll_processes()

    def start(self, slot: int) -> None:
        """Start the ranks. slot: number of their share of the machine's devices."""
        self._slot, self._asked_to_stop, self._failed = slot, False, None
        self._deadline = time.monotonic() + self._program.seconds if self._program.seconds else _NEVER
        with block_stop_signals():
            self._processes = [self._start(rank) for rank in range(self._program.ranks)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        program, paths = self._program, JobPaths(self._program.folder, self._job_id, rank)
        paths.folder.mkdir(parents=True, exist_ok=True)
        variables = {"LOCALID": str(rank), "GLOBALID": str(rank), "JOB_ID": self._job_id}
        with (
            _open_log(paths.stdout) as out,
            contextlib.nullcontext(out) if program.one_log else _open_log(paths.stderr) as err,
        ):
            return subprocess.Popen(
                program.words(),
                env={
                    **program.environment,
                    **program.gpu_environment(self._slot),
                    **{f"SUBMITIT_LOCAL_{k}": v for k, v in variables.items()},
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C is for whoever waits for the job
            )

    def has_ended(self) -> bool:
        """Whether all ranks have ended, and no further run of this job follows."""
        return self.poll_processes() is not None

    def poll_processes(self) -> int | None:
        """Return the exit code, or None; nothing is started but a further run of this job."""
        if self._code is None and self._processes:
            codes = [process.poll() for process in self._processes]
            if self._failed is None:
                self._failed = next((code for code in codes if code), None)
                if self._failed is not None:
                    # The others would wait in a collective for the rank that is gone.
                    self._kill_at = min(self._kill_at, time.monotonic() + _GRACE_SECONDS)
            if None in codes:
                self._watch_clock()
            else:
                self._finish_run()
        return self._code

    def _finish_run(self) -> None:
        marker = JobPaths(self._program.folder, self._job_id).folder / requeue_marker_name(self._job_id)
        again = marker.exists() and not self._cancelled
        marker.unlink(missing_ok=True)
        self._attempt += 1
        if again and self._attempt < self._program.max_attempts:
            self._kill_at = _NEVER
            self.start(self._slot)
        else:
            self._code = self._failed or 0

    def _watch_clock(self) -> None:
        now = time.monotonic()
        due = self._deadline - self._program.notice
        # Escalate: ask to save, then SIGTERM at the time limit, then SIGKILL after a grace period.
        if now > due and not self._asked_to_stop and self._program.notice < self._program.seconds:
            self._asked_to_stop = True
            self._signal_ranks(signal.SIGUSR2)
        if now > self._deadline:
            self._deadline, self._kill_at, self._cancelled = _NEVER, now + _GRACE_SECONDS, True
            self._signal_ranks(signal.SIGTERM)
        if now > self._kill_at:
            self._kill_at = _NEVER
            self._signal_ranks(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal to the ranks.

        After SIGUSR2 the job may run again; any other signal ends it, soon by SIGKILL.
        """
        self._cancelled = self._cancelled or number != signal.SIGUSR2
        if not self._processes and self._code is None and self._cancelled:
            self._code = -number
        if self._cancelled:
            self._kill_at = min(self._kill_at, time.monotonic() + _GRACE_SECONDS)
        self._signal_ranks(number)

    def _signal_ranks(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        """End all ranks at once, and whatever they started in their sessions."""
        self._cancelled = True
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        # A rank that failed before the kill keeps its own exit code.
        self._code = self._code if self._code is not None else -signal.SIGKILL

    def wait(self) -> int:
        """Wait for the end of the job, and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.05)
        return code


def _open_log(path: Path) -> IO[bytes]:
    """Open a log to append, readable by its owner alone."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
