"""What is asked of a function beyond being called; everything is optional, and a plain function has none of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths

ELEMENT = "HPC_TRAIN_ELEMENT"
"""Which of the elements that share one call this process belongs to."""
SHARED = "HPC_TRAIN_CALL"
"""Path of the pickle that the elements share."""


def element() -> int:
    """The element of an array (or of the local pool) that this process is."""
    return int(os.environ.get(ELEMENT, "0"))


def submitted(paths: JobPaths) -> Path:
    """The pickle of this job: its own, which a checkpoint leaves too, else the one that it shares."""
    own, shared = paths.submitted_pickle, os.environ.get(SHARED, "")
    return Path(shared) if shared and not own.exists() else own


def fails(function: Any, result: Any) -> bool:
    """Whether a function calls its own result a failure: the job then ends with an exit code that says so."""
    judge = getattr(function, "fails", None)
    return bool(judge(result)) if judge else False


def is_kept(function: Any, rank: int, result: Any) -> bool:
    """Whether the result of this rank is worth a file."""
    keeps = getattr(function, "keeps", None)
    return bool(keeps(rank, result)) if keeps else True


def again(delayed: DelayedSubmission) -> DelayedSubmission | None:
    """What to call after a requeue, as the function's own `checkpoint` says; None if it has none or wants no more."""
    following: DelayedSubmission | None = delayed._checkpoint_function()
    return following


def can_go_on(function: Any) -> bool:
    """Whether a requeue after the time limit makes sense."""
    return hasattr(function, "checkpoint") or hasattr(function, "__submitit_checkpoint__")
