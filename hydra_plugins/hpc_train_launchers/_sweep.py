"""Run a sweep: compose every point, hand all of them to a backend, wait for them, and return what Hydra expects."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hpc_train.errors import UserError
from hpc_train.launch.callables.calls import make_private_folder, pickle_value
from hpc_train.launch.callables.training_function import read_point_warnings
from hpc_train.launch.callables.waiting import JobEnd, JobSource, StartedJob, wait_for_jobs
from hpc_train.launch.slurm.slurm_cli import handle_signals
from hydra_plugins.hpc_train_launchers._point import SharedState, cache_composed_points, write_points_file

_MAX_NAMED = 3
"""Points that are named in a line about several."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Application:
    """The application, as Hydra hands it to a launcher."""

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    original_context: HydraContext
    """The context with Hydra's own config loader, which is what the jobs get."""


def make_application(context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Application:
    """Take what Hydra's `setup` is given; from now on no point is composed twice."""
    return Application(context, task_function, config, HydraContext(cache_composed_points(context), context.callbacks))


@dataclass(frozen=True)
class Points:
    """The points of one sweep, or of one batch of a sweeper."""

    pickled: list[bytes]
    """Their configurations, in order; pickled, they take a tenth of the memory."""
    file: Path
    """Path of the file that write_points_file wrote."""
    folder: Path

    def read_config(self, index: int) -> DictConfig:
        """Return the configuration of one point."""
        config: DictConfig = pickle.loads(self.pickled[index])
        return config


class Backend(Protocol):
    """Runs points: on this machine, or on Slurm."""

    @property
    def folder(self) -> str:
        """Setting `folder`."""

    def start(self, points: Points, config: DictConfig) -> list[StartedJob]:
        """Start all points or none, and return the job of each, in order. config: the sweep's. Raises UserError."""

    def source(self) -> JobSource:
        """Return what tells how the jobs end."""

    def close(self) -> None:
        """Leave nothing behind, after all jobs have ended."""

    def cancel(self) -> None:
        """End the jobs that have not ended."""


class PointError(RuntimeError):
    """A point returned nothing: its job was killed, ran out of time, or failed before the task function."""


def launch_points(
    application: Application, backend: Backend, overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Run the points (Hydra's Launcher.launch); failures of points are returned.

    Raises CompactHydraException, which Hydra prints without a traceback, for what cannot be submitted.
    """
    config = application.config
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    try:
        points = _write_points(application, backend, overrides, first)
        ends = _run_points(backend, points, config)
    except UserError as error:
        raise CompactHydraException(str(error)) from error
    finally:
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    returns = [_make_return(end, points, index) for index, end in enumerate(ends)]
    _log_warnings(returns, first)
    _log_failures(returns, first)
    return returns


def _write_points(application: Application, backend: Backend, overrides: Sequence[Sequence[str]], first: int) -> Points:
    """Compose and write down every point now: what is edited later does not change it."""
    Path(str(application.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    folder = make_private_folder(Path(backend.folder).expanduser().absolute())
    pickled = [pickle_value(_compose(application, list(words), first + index)) for index, words in enumerate(overrides)]
    points = Points(pickled, folder / f"points-{first}-{os.getpid()}.pkl", folder)
    shared = SharedState(application.original_context, application.task_function, Singleton.get_state())
    write_points_file(points.file, shared, points.pickled)
    for index, words in enumerate(overrides):
        log.info(f"\t#{first + index} : {' '.join(filter_overrides(words))}")
    return points


def _compose(application: Application, words: list[str], number: int) -> DictConfig:
    composed = application.context.config_loader.load_sweep_config(application.config, words)
    with open_dict(composed):
        composed.hydra.job.num = number
    return composed


def _run_points(backend: Backend, points: Points, config: DictConfig) -> list[JobEnd]:
    """Run the points, and return how each ended, in order. No job outlives this process if it is told to stop."""
    try:
        with _exit_on_stop_signals():
            jobs = backend.start(points, config)
            ends = wait_for_jobs(jobs, points.folder, backend.source(), is_failure)
            backend.close()
    except UserError:
        backend.cancel()
        points.file.unlink(missing_ok=True)
        with suppress(OSError):  # something else lies in it
            points.folder.rmdir()
        raise
    except BaseException:
        backend.cancel()
        log.info("the jobs of this sweep were cancelled")
        raise
    return [ends[job.job_id] for job in jobs]


@contextmanager
def _exit_on_stop_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that jobs are cancelled. nohup's SIGHUP stays ignored."""
    fatal = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    with handle_signals(fatal, _exit_on_signal):
        yield


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def is_failure(returned: Any) -> bool:
    """Whether a point returned that it failed."""
    return isinstance(returned, JobReturn) and returned.status is not JobStatus.COMPLETED


def _make_return(end: JobEnd, points: Points, index: int) -> JobReturn:
    if isinstance(end.value, JobReturn):
        return end.value
    config = points.read_config(index)
    returned = JobReturn(overrides=list(config.hydra.overrides.task), task_name=config.hydra.job.name)
    returned.hydra_cfg, returned.cfg = _split_config(config)
    returned.working_dir = str(Path.cwd())
    returned.status = JobStatus.FAILED
    returned.return_value = PointError(end.error)
    return returned


def _split_config(config: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Split a configuration into Hydra's part and the task's."""
    task, own = config.copy(), config.copy()
    with read_write(task), open_dict(task):
        del task["hydra"]
    with read_write(own), open_dict(own):
        for key in list(own):
            if key != "hydra":
                del own[key]
    return own, task


def _log_warnings(returns: Sequence[JobReturn], first: int) -> None:
    """Log what the points' ranks warned of: each text once, with the points that it is of."""
    points: dict[str, list[str]] = {}
    for index, returned in enumerate(returns):
        for text in read_point_warnings(_find_output_directory(returned)):
            points.setdefault(text, []).append(f"#{first + index}")
    for text, numbers in points.items():
        log.warning(f"\t{_join_points(numbers)}: {text}")


def _join_points(numbers: list[str]) -> str:
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return ", ".join(numbers[:_MAX_NAMED]) + more


def _find_output_directory(returned: JobReturn) -> Path:
    """Return the output directory of a point, which is not in the configuration of one that left no result."""
    assert returned.hydra_cfg is not None
    hydra = returned.hydra_cfg.hydra
    if OmegaConf.is_missing(hydra.runtime, "output_dir"):
        return Path(str(hydra.sweep.dir)) / str(hydra.sweep.subdir)
    return Path(str(hydra.runtime.output_dir))


def _log_failures(returns: Sequence[JobReturn], first: int) -> None:
    for index, returned in enumerate(returns):
        if is_failure(returned):
            line = str(returned._return_value).strip().splitlines()[:1] or [type(returned._return_value).__name__]
            log.error(f"\t#{first + index} failed: {line[0]}")
