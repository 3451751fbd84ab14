"""Define what a logger is and what it is told about its run, and list the available loggers.

A package offers one as an entry point of the group `hpc_train.loggers`: a function or class that takes a LoggedRun and
returns a Logger. It runs in a process of its own (logger_process.py), so it may block or fail.

Imports no logger's library: a run loads only those that it asks for.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names
from hpc_train.regular_files import read_regular, write_private_file

ENTRY_POINTS = "hpc_train.loggers"
"""Group of the entry points by which an installed package offers loggers."""
LIBRARIES = {"wandb": "wandb", "mlflow": "mlflow"}
"""Logger -> the module that it needs."""
_NAMES = ("csv", *LIBRARIES)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""It is part of the name of a file."""
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Logger(Protocol):
    """Takes the metrics of a run, step by step."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one line of metrics.jsonl: `step`, and numbers by name. A number that is not known is None.

        A step comes again after a resume from before it, or with its validation loss alone.
        """
        ...

    def close(self, failed: bool = False) -> None:
        """Write or upload what is left. failed: the run ends by an error."""
        ...


@dataclass(frozen=True)
class LoggedRun:
    """Description of a run for its loggers. The fields are JSON values, except for `folder`."""

    name: str
    folder: Path
    """Folder of the logger's own in the run directory; the same in every attempt, and there already."""
    group: str | None = None
    """The sweep that the run is a point of, or loggers.group."""
    attempt: int = 0
    """Number of this attempt; the first is 0."""
    resumed_at: int = 0
    """Step from which this attempt continues."""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration of the run. Secrets cannot be in it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The part of the configuration for this logger: loggers.wandb, loggers.mlflow, or loggers.args."""
    shared_folder: Path | None = None
    """Like `folder`, but of the sweep; a logger that uses it creates it. None for a run that is not part of a sweep."""
    process: int = 0
    """Process id of rank 0."""


def check_loggers(names: Iterable[str]) -> None:
    """Raise UserError for a logger that is not offered, or whose library is not installed. Imports none."""
    for name in names:
        if name in LIBRARIES and find_spec(LIBRARIES[name]) is None:
            library = LIBRARIES[name]
            raise UserError(f"loggers.use={name}: {library} is not installed; pip install {library}, or leave it out")
        offered = [] if name in _NAMES else sorted(filter(_NAME.fullmatch, entry_points(group=ENTRY_POINTS).names))
        if name not in (*_NAMES, *offered):
            raise UserError(f"loggers.use={name}: no such logger; {suggest_names(name, [*_NAMES, *offered])}")


def open_logger(name: str, run: LoggedRun) -> Logger:
    """Import the logger of this name and open it for a run. Whatever its library raises is passed on."""
    if name == "csv":
        from hpc_train.training.loggers.csv_logger import CsvLogger

        return CsvLogger(run.folder / "metrics.csv", run.resumed_at)
    if name == "wandb":
        from hpc_train.training.loggers.wandb_logger import WandbLogger

        return WandbLogger(run)
    if name == "mlflow":
        from hpc_train.training.loggers.mlflow_logger import MlflowLogger

        return MlflowLogger(run)
    (point,) = entry_points(group=ENTRY_POINTS, name=name)
    factory: Callable[[LoggedRun], Logger] = point.load()
    return factory(run)


def read_run_id(folder: Path) -> str | None:
    """Return the id that an earlier attempt has written; None if there is none.

    A damaged file counts as none: the run then gets a new id.
    """
    try:
        text = read_regular(folder / "run_id", 256).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _RUN_ID.fullmatch(text) else None


def write_run_id(folder: Path, run_id: str) -> None:
    """Write the id of the run for later attempts. Raises OSError."""
    write_private_file(folder / "run_id", f"{run_id}\n")


def make_run_id() -> str:
    """Return a new id of 12 hexadecimal digits."""
    return secrets.token_hex(6)
