"""Start the loggers that a run asks for, and end them together.

CSV is a file, written by rank 0 itself. All others get a process each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.config.plain_config import config_to_dict
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.training.loggers.interface import LoggedRun, Logger, check_loggers, open_logger
from hpc_train.training.loggers.logger_process import LoggerProcess
from hpc_train.training.run_directory import RunDirectory

_IN_THIS_PROCESS = ("csv",)


def start_loggers(config: RunConfig, directory: RunDirectory, attempt: int, resumed_at: int) -> list[Logger]:
    """Start every logger of loggers.use.

    Raises UserError for one that does not exist, or whose folder cannot be made; later failures are warnings.
    """
    check_loggers(config.loggers.use)
    loggers: list[Logger] = []
    for name in config.loggers.use:
        run = describe_run(name, config, directory, attempt, resumed_at)
        if name in _IN_THIS_PROCESS:
            loggers.append(open_logger(name, run))
        else:
            output = directory.logs(attempt) / f"logger-{name}.log"
            loggers.append(LoggerProcess(name, run, output, config.loggers.close_seconds))
    return loggers


def close_loggers(loggers: Sequence[Logger], failed: bool) -> None:
    """Close all loggers at the same time, so that together they take no longer than one may."""
    processes = [logger for logger in loggers if isinstance(logger, LoggerProcess)]
    for process in processes:
        process.begin_close(failed)
    for logger in loggers:
        if not isinstance(logger, LoggerProcess):
            logger.close(failed)
    started = time.monotonic()
    for process in processes:
        process.finish_close(started, failed)


def describe_run(name: str, config: RunConfig, directory: RunDirectory, attempt: int, resumed_at: int) -> LoggedRun:
    """Describe a run to the logger of this name, and make the folder of the logger. Raises UserError if that fails."""
    loggers, sweep = config.loggers, find_sweep_folder(directory.path)
    config_dict = config_to_dict(config)
    settings: dict[str, Any] = (
        config_dict["loggers"].get(name) if name in ("wandb", "mlflow") else config_dict["loggers"]["args"]
    )
    return LoggedRun(
        name=loggers.name or directory.path.name,
        folder=_make_folder(directory.path / "loggers" / name),
        group=loggers.group or (sweep.name if sweep else None),
        attempt=attempt,
        resumed_at=resumed_at,
        tags=list(loggers.tags),
        config=config_dict,
        settings=settings,
        shared_folder=sweep / "loggers" / name if sweep else None,
        process=os.getpid(),
    )


def find_sweep_folder(run: Path) -> Path | None:
    """Return the directory of the sweep to which a run belongs; None if it belongs to none."""
    sweep = run.parent.parent
    return sweep if run.parent.name == "points" and (sweep / "points.jsonl").is_file() else None


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; move it away, or leave the logger out of loggers.use") from error
    return folder
