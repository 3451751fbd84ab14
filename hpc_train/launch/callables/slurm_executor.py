"""Run callables as Slurm jobs: submitit's executor with our batch script, environment and states; all or nothing.

The batch script lets a job run again when its ranks stopped on purpose or a node died.
"""

from __future__ import annotations

import copy
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob, _make_sbatch_string

from hpc_train.errors import UserError
from hpc_train.launch.callables.calls import (
    make_private_folder,
    make_worker_command,
    pickle_value,
)
from hpc_train.launch.slurm.array_size import max_array_size, split_evenly
from hpc_train.launch.slurm.batch_script import END_TOGETHER, checked_lines, shell_functions
from hpc_train.launch.slurm.polling import poll_jobs
from hpc_train.launch.slurm.sbatch import explain_refusal
from hpc_train.launch.slurm.slurm_cli import client_environment, delay_signals, run_client
from hpc_train.regular_files import write_private_file

_PATH_TAGS = ("%j", "%t", "%A", "%a")
"""Parts of a folder's name for which submitit puts the job, the rank, the array and the element."""
FORGOTTEN_STATE = "NOT_FOUND"
"""The state of a job that Slurm has forgotten; submitit takes every word it does not know for an end."""


class StateWatcher(SlurmInfoWatcher):
    """The states of all jobs by one poll, with and without accounting."""

    def update(self) -> None:
        """Ask about every job that is not known to have ended."""
        self._num_calls += 1
        unfinished = sorted(self._registered - self._finished)
        polled = poll_jobs(unfinished, run_client)
        for job in unfinished:
            record = polled.records.get(job)
            if record is not None:
                self._info_dict[job] = {"JobID": job, "State": record.state, "NodeList": ",".join(record.nodes)}
            elif polled.slurm_error is None:
                self._info_dict[job] = {"JobID": job, "State": FORGOTTEN_STATE}
        self._mark_finished(unfinished)

    def _mark_finished(self, jobs: Sequence[str]) -> None:
        self._last_status_check = time.time()
        self._finished.update(job for job in jobs if self.is_done(job, mode="cache"))


class CallJob(SlurmJob[Any]):
    """submitit's job, whose end is noticed with and without accounting."""

    watcher = StateWatcher(delay_s=60)


@dataclass
class _Submitted:
    """The files and the jobs that a submission has made so far."""

    files: list[Path] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    def undo(self) -> None:
        if self.jobs:
            run_client(["scancel", *self.jobs])
        for path in self.files:
            path.unlink(missing_ok=True)


class SlurmCallExecutor(SlurmExecutor):
    """submitit's Slurm executor, whose files are private to their owner, and whose jobs say how they ended."""

    job_class = CallJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        max_attempts: int = 100,
    ) -> None:
        """environment: of the jobs; None: all of this process's but what steers Slurm's clients."""
        super().__init__(folder, max_num_timeout, max_pickle_size_gb, python)
        self._environment = dict(client_environment() if environment is None else environment)
        self._max_attempts = max_attempts
        self._throttling = 0.0  # submitit sleeps so long between two jobs, by default 0.2 s
        self._submitted = _Submitted()
        if any(tag in str(self.folder) for tag in _PATH_TAGS):
            raise UserError(f"{self.folder}: all jobs share this folder; leave out {', '.join(_PATH_TAGS)}")

    @classmethod
    def name(cls) -> str:
        """Return submitit's name of its own executor: jobs find the environment of that."""
        return "slurm"

    @property
    def _submitit_command_str(self) -> str:
        return make_worker_command(self.python, self.folder)

    def submit_elements(self, call: Callable[[], Any], count: int) -> list[str]:
        """Submit an array whose `count` elements share one pickle of `call`, and return their job ids.

        The call learns from calls.array_element() which one it is. Raises UserError with sbatch's reason.
        """
        data = self._pickle_call(DelayedSubmission(call))
        with self._all_or_nothing():
            base = self._submit_array(count)
            self._write_call(data, JobPaths(self.folder, base))
        return [f"{base}_{index}" for index in range(count)]

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        calls = [self._pickle_call(delayed, len(delayed_submissions)) for delayed in delayed_submissions]
        with self._all_or_nothing():
            if len(calls) == 1:
                job = self._submit_command(self._submitit_command_str)
                self._write_call(calls[0], job.paths)
                return [job]
            parts = split_evenly(len(calls), max(1, max_array_size(run_client)))
            return [job for part in parts for job in self._as_array([calls[index] for index in part])]

    def _as_array(self, calls: Sequence[bytes]) -> list[Job[Any]]:
        base, tasks = self._submit_array(len(calls)), list(range(self._num_tasks()))
        jobs: list[Job[Any]] = [self.job_class(self.folder, f"{base}_{index}", tasks) for index in range(len(calls))]
        for job, data in zip(jobs, calls, strict=True):
            self._write_call(data, job.paths)
        return jobs

    def _submit_array(self, count: int) -> str:
        array = copy.copy(self)  # of our own class, with all of its parameters
        array.parameters = {**self.parameters, "map_count": count}
        return str(array._submit_command(self._submitit_command_str).job_id)

    def _pickle_call(self, delayed: DelayedSubmission, count: int = 1) -> bytes:
        """Pickle a call before anything is submitted. Raises UserError for calls that are too large for files."""
        delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
        data = pickle_value(delayed)
        if (size := count * len(data) / 1024**3) > self.max_pickle_size_gb:
            raise UserError(
                f"{count} calls of {len(data)} bytes are {size:.2f} GiB, more than {self.max_pickle_size_gb:g}; "
                "let the function read its data itself, or raise max_pickle_size_gb"
            )
        return data

    def _write_call(self, data: bytes, paths: JobPaths) -> None:
        self._submitted.files.append(paths.submitted_pickle)
        write_private_file(paths.submitted_pickle, data)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        make_private_folder(self.folder)
        self._submitted = _Submitted()
        try:
            with delay_signals():
                yield
        except BaseException:
            self._submitted.undo()
            raise

    def _submit_command(self, command: str) -> Job[Any]:
        """Hand the script to sbatch, in the environment that the job gets. Raises UserError with its reason."""
        path = self.folder / f"script-{uuid.uuid4().hex}.sh"
        self._submitted.files.append(path)
        write_private_file(path, self._make_submission_file_text(command, ""))
        try:
            output = utils.CommandFunction(self._make_submission_command(path), verbose=False, env=self._environment)()
        except FailedJobError as refused:
            raise explain_refusal(str(refused)) from None
        job = self.job_class(
            self.folder, self._get_job_id_from_submission_command(output), list(range(self._num_tasks()))
        )
        self._submitted.jobs.append(job.job_id)
        self._submitted.files.append(path.rename(JobPaths(self.folder, job.job_id).submission_file))
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """Return the text of the batch script. uid: not used here; submitit's own method has it.

        Raises UserError for a control character: after a newline the rest of the value would run as shell.
        """
        given = {"setup": None, "teardown": None, "srun_args": None, **self.parameters}
        _refuse_control_characters(given)
        signal_seconds, cpus = given.get("signal_delay_s", 90), given.get("cpus_per_task")
        parameters = {
            **given,
            "setup": render_setup(self.folder, given["setup"] or (), signal_seconds, self._max_attempts),
            "teardown": render_teardown(given["teardown"] or ()),
            "srun_args": [*END_TOGETHER, *([f"--cpus-per-task={cpus}"] if cpus else []), *(given["srun_args"] or ())],
        }
        folder = str(self.folder).replace("%", "%%")  # Slurm's file patterns
        return str(_make_sbatch_string(command=command, folder=folder, **parameters))


def _refuse_control_characters(parameters: Mapping[str, Any]) -> None:
    for name, value in [*parameters.items(), *(parameters.get("additional_parameters") or {}).items()]:
        lines = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(line, str) and not line.replace("\t", " ").isprintable() for line in lines):
            raise UserError(f"{name}: {value!r} has a control character; leave it out")


def render_setup(folder: Path, setup: Sequence[str], signal_seconds: int, max_attempts: int) -> list[str]:
    """Return the shell lines before the ranks: the settings, the functions of callables.sh, and the user's set-up."""
    user = [*checked_lines("setup", setup), 'doing=""'] if setup else []
    return [
        f"calls={shlex.quote(str(folder))}",
        f'hpc_max_attempts={max_attempts} hpc_signal_seconds={signal_seconds} hpc_threads="$OMP_NUM_THREADS"',
        shell_functions("callables"),
        "begin_calls",
        *user,
    ]


def render_teardown(teardown: Sequence[str]) -> list[str]:
    """Return the shell lines after the ranks, with the user's among them."""
    return ["code=$?", *teardown, 'finish_calls "$code"']
