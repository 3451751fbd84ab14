"""The calls of a job that runs a Python function, and the pickles of calls and results.

The files are submitit's: a call in <job>_submitted.pkl, a result in <job>_<rank>_result.pkl. What a function may have
beyond being callable is optional: `checkpoint`, `fails`, `keeps`. A pickle is a program, so only its owner reads and
writes it, and it appears whole by one rename.
"""

from __future__ import annotations

import os
import pickle
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
from submitit.core.utils import DelayedSubmission, JobPaths

from hpc_train.errors import UserError
from hpc_train.regular_files import check_private_file, open_to_read, write_private_file

ELEMENT_VARIABLE = "HPC_TRAIN_ELEMENT"
"""Which of the elements that share one call this process belongs to."""
SHARED_CALL_VARIABLE = "HPC_TRAIN_CALL"
"""Path of the pickle that the elements share."""


def array_element() -> int:
    """Return the index of this process's element of an array, or of the local pool."""
    return int(os.environ.get(ELEMENT_VARIABLE, "0"))


def find_submitted_pickle(paths: JobPaths) -> Path:
    """Return the pickle of this job: its own, which a checkpoint leaves too, else the one that elements share."""
    pickle_of_job, shared = paths.submitted_pickle, os.environ.get(SHARED_CALL_VARIABLE, "")
    return Path(shared) if shared and not pickle_of_job.exists() else pickle_of_job


def is_failure(function: Any, result: Any) -> bool:
    """Whether a function calls its own result a failure: the job then ends with an exit code that says so."""
    judge = getattr(function, "fails", None)
    return bool(judge(result)) if judge else False


def keeps_result(function: Any, rank: int, result: Any) -> bool:
    """Whether the result of this rank is worth a file."""
    keeps = getattr(function, "keeps", None)
    return bool(keeps(rank, result)) if keeps else True


def choose_next_call(delayed: DelayedSubmission) -> DelayedSubmission | None:
    """Return what to call after a requeue, by the function's own `checkpoint`; None if it wants no further call."""
    following: DelayedSubmission | None = delayed._checkpoint_function()
    return following


def can_resume(function: Any) -> bool:
    """Whether a requeue after the time limit makes sense."""
    return hasattr(function, "checkpoint") or hasattr(function, "__submitit_checkpoint__")


_WAIT_SECONDS = 60.0
"""Seconds that a file system may take to show a node what the login node wrote."""


def make_private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter. Raises UserError if it cannot be made, or is somebody else's."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose a folder that can be written") from None
    return path


def pickle_value(value: Any) -> bytes:
    """Pickle a value, with functions and classes of `__main__` by value."""
    return bytes(cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def save_pickle(value: Any, path: Path) -> None:
    """Replace `path` by the pickle of a value; private, because whoever reads a pickle executes it."""
    write_private_file(path, pickle_value(value))


def load_pickle(path: Path) -> Any:
    """Load a pickle. Raises UserError if anybody else could have written it: a pickle is a program."""
    with open_to_read(path) as file:
        check_private_file(path, os.fstat(file.fileno()))
        return pickle.load(file)


def wait_for_file(path: Callable[[], Path]) -> Path:
    """Return `path()` as soon as it exists, asked again each time: the job may start before its call is written.

    The call is named by the job id, which is only known once sbatch has returned.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (file := path()).exists():
        if time.monotonic() > deadline:
            raise UserError(f"{file}: is not there; is it on a file system that this node shares?")
        time.sleep(0.1)
    return file


def make_worker_command(python: str, folder: Path) -> str:
    """Return the shell words that start a rank. python: the words that start Python, quoted."""
    return f"{python} -u -m hpc_train.launch.callables.worker {shlex.quote(str(folder))}"
