"""Functions as processes of this machine: submitit's local executor with a cap on how many jobs run at once."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor, LocalJob

from hpc_train.launch.functions import script
from hpc_train.launch.functions.call import ELEMENT, SHARED
from hpc_train.launch.functions.files import pickled, private_folder, write
from hpc_train.launch.functions.ranks import Program, Ranks
from hpc_train.launch.functions.stopping import SIGNAL_SECONDS


@dataclass
class Pool:
    """Jobs of this process, of which at most `at_once` run; each running one has a slot of its own."""

    at_once: int
    running: list[Ranks] = field(default_factory=list)
    waiting: deque[Ranks] = field(default_factory=deque)

    def turn(self) -> None:
        """Notice those that have ended, and start the next; whoever looks at a job calls it."""
        for job in [job for job in self.running if job.look() is not None]:
            self.running.remove(job)
        while self.waiting and len(self.running) < self.at_once:
            job = self.waiting.popleft()
            if job.look() is None:
                job.start(min(set(range(self.at_once)) - {it.slot for it in self.running}))
                self.running.append(job)


def machine_at_once(ranks: int) -> int:
    """Jobs of so many ranks that this process's cores are enough for."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class PoolExecutor(LocalExecutor):
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
        """at_once: jobs that run at the same time; None: as many as there are cores for their ranks."""
        super().__init__(folder, max_num_timeout, max_pickle_size_gb, python)
        self._at_once, self._max_attempts = at_once, max_attempts
        self._pool = Pool(at_once or 1)
        self._throttling = 0.0

    @classmethod
    def name(cls) -> str:
        """As submitit's own, whose environment it keeps."""
        return "local"

    @property
    def _submitit_command_str(self) -> str:
        return script.worker_command(self.python, self.folder)

    @property
    def ranks(self) -> int:
        """Processes of a job."""
        return int(self.parameters.get("tasks_per_node", 1))

    def submit_elements(self, call: Callable[[], Any], count: int) -> list[LocalJob[Any]]:
        """`count` jobs that share one pickle of `call`, which learns from functions.call.element() which it is."""
        data = self._pickled(DelayedSubmission(call))
        base = _new_id()
        shared = JobPaths(self.folder, base).submitted_pickle
        write(data, shared)
        return [self._queue(f"{base}{index:06d}", {ELEMENT: str(index), SHARED: str(shared)}) for index in range(count)]

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        jobs = []
        for data in [self._pickled(delayed) for delayed in delayed_submissions]:
            job_id = f"{_new_id()}000000"
            paths = JobPaths(self.folder, job_id)
            private_folder(paths.folder)
            write(data, paths.submitted_pickle)
            jobs.append(self._queue(job_id, {}))
        return jobs

    def _pickled(self, delayed: DelayedSubmission) -> bytes:
        delayed.set_timeout(self.parameters.get("timeout_min", 5), self.max_num_timeout)
        return pickled(delayed)

    def _queue(self, job_id: str, environment: Mapping[str, str]) -> LocalJob[Any]:
        self._pool.at_once = self._at_once or machine_at_once(self.ranks)
        process = Ranks(self._program(environment), job_id, self._pool.turn)
        self._pool.waiting.append(process)
        self._pool.turn()
        tasks = list(range(self.ranks))
        return LocalJob(self.folder, job_id, tasks, process)  # type: ignore[arg-type]

    def _program(self, environment: Mapping[str, str]) -> Program:
        get = self.parameters.get
        seconds, notice = 60.0 * get("timeout_min", 2.0), get("signal_delay_s", 30)
        visible = [str(it) for it in get("visible_gpus", ())]
        own = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(self.ranks),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": f"{seconds:g}",
            SIGNAL_SECONDS: str(notice),
        }
        return Program(
            self._submitit_command_str,
            self.folder,
            {**os.environ, **own, **get("environment", {}), **environment},
            self.ranks,
            get("setup", ()),
            seconds,
            notice,
            self._max_attempts,
            get("stderr_to_stdout", False),
            visible or visible_devices(),
            get("gpus_per_node"),
        )


def visible_devices() -> list[str]:
    """The CUDA devices that this process may share out, by the names that CUDA_VISIBLE_DEVICES takes."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _new_id() -> str:
    """A number that no job of this folder has had."""
    return str(time.time_ns() // 1000)


@dataclass(frozen=True)
class Local:
    """Who runs local jobs, for waiting: knows every end at once."""

    jobs: Mapping[str, LocalJob[Any]]
    grace: float = 0.0

    def ended(self, jobs: Collection[str], hurry: bool) -> Mapping[str, str]:
        """hurry changes nothing."""
        codes = {job: self.jobs[job]._process.poll() for job in jobs}  # type: ignore[union-attr]
        return {job: _how(code) for job, code in codes.items() if code is not None}


def _how(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""
