"""A sweep from Hydra's overrides to Hydra's returns: compose everything, hand it over, wait, tell."""

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
from omegaconf import DictConfig, open_dict, read_write

from hpc_train.errors import UserError
from hpc_train.launch.callables.calls import make_private_folder, pickle_value
from hpc_train.launch.callables.waiting import JobEnd, JobSource, StartedJob, wait_for_jobs
from hpc_train.launch.slurm.slurm_cli import handle_signals
from hydra_plugins.hpc_train_launchers._compose import remember
from hydra_plugins.hpc_train_launchers._parcel import pack
from hydra_plugins.hpc_train_launchers._point import Shared

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Application:
    """What Hydra hands a launcher."""

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    handed: HydraContext
    """The context as Hydra handed it, without our memory of what was composed."""


def application(context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Application:
    """From what Hydra's `setup` is given; from now on nobody composes a point twice."""
    return Application(context, task_function, config, HydraContext(remember(context), context.callbacks))


@dataclass(frozen=True)
class Points:
    """The points of one sweep (or one batch of it), composed for good."""

    blobs: list[bytes]
    """Pickled configurations, in order: a tenth of the memory."""
    parcel: Path
    folder: Path

    def config(self, index: int) -> DictConfig:
        """The configuration of one point."""
        found: DictConfig = pickle.loads(self.blobs[index])
        return found


class Backend(Protocol):
    """Where points run."""

    @property
    def folder(self) -> str:
        """Setting `folder`."""

    def start(self, points: Points, config: DictConfig) -> list[StartedJob]:
        """Hand all of them over, or none: a job for each point, in order. Raises UserError. config: the sweep's own."""

    def source(self) -> JobSource:
        """Who tells how they end."""

    def cancel(self) -> None:
        """End whatever has not ended."""


class PointError(RuntimeError):
    """A point that left no return: its job was killed, ran out of time, or never got as far."""


def launch(
    application: Application, backend: Backend, overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Hydra's Launcher.launch; failures of points are returned.

    Raises CompactHydraException, which Hydra prints without a traceback, for what cannot be submitted.
    """
    config = application.config
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    try:
        points = _freeze(application, backend, overrides, first)
        ends = _run(backend, points, config)
    except UserError as error:
        raise CompactHydraException(str(error)) from error
    finally:
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    returns = [_returned(end, points, index) for index, end in enumerate(ends)]
    _tell(returns, first)
    return returns


def _freeze(application: Application, backend: Backend, overrides: Sequence[Sequence[str]], first: int) -> Points:
    """Compose every point now: what is edited later changes nothing of it."""
    Path(str(application.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    folder = make_private_folder(Path(backend.folder).expanduser().absolute())
    blobs = [pickle_value(_compose(application, list(words), first + index)) for index, words in enumerate(overrides)]
    points = Points(blobs, folder / f"points-{first}-{os.getpid()}.pkl", folder)
    shared = Shared(application.handed, application.task_function, Singleton.get_state())
    pack(points.parcel, shared, points.blobs)
    for index, words in enumerate(overrides):
        log.info(f"\t#{first + index} : {' '.join(filter_overrides(words))}")
    return points


def _compose(application: Application, words: list[str], number: int) -> DictConfig:
    composed = application.context.config_loader.load_sweep_config(application.config, words)
    with open_dict(composed):
        composed.hydra.job.num = number
    return composed


def _run(backend: Backend, points: Points, config: DictConfig) -> list[JobEnd]:
    """The end of every point, in order. If this process is told to stop, no job of the sweep goes on."""
    try:
        with _ended_by_signals():
            jobs = backend.start(points, config)
            ends = wait_for_jobs(jobs, points.folder, backend.source(), fails)
    except UserError:
        backend.cancel()
        points.parcel.unlink(missing_ok=True)
        with suppress(OSError):  # something else lies in it
            points.folder.rmdir()
        raise
    except BaseException:
        backend.cancel()
        log.info("the jobs of this sweep were cancelled")
        raise
    return [ends[job.job_id] for job in jobs]


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What ends this process without Python's knowledge unwinds it, as Ctrl-C does. nohup's SIGHUP stays ignored."""
    own = [it for it in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(it) is signal.SIG_DFL]
    with handle_signals(own, _leave):
        yield


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def fails(returned: Any) -> bool:
    """Whether a point says itself that it failed."""
    return isinstance(returned, JobReturn) and returned.status is not JobStatus.COMPLETED


def _returned(end: JobEnd, points: Points, index: int) -> JobReturn:
    if isinstance(end.value, JobReturn):
        return end.value
    config = points.config(index)
    returned = JobReturn(overrides=list(config.hydra.overrides.task), task_name=config.hydra.job.name)
    returned.hydra_cfg, returned.cfg = _parts(config)
    returned.working_dir = str(Path.cwd())
    returned.status = JobStatus.FAILED
    returned.return_value = PointError(end.error)
    return returned


def _parts(config: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Hydra's own part, and the task's."""
    task, own = config.copy(), config.copy()
    with read_write(task), open_dict(task):
        del task["hydra"]
    with read_write(own), open_dict(own):
        for key in list(own):
            if key != "hydra":
                del own[key]
    return own, task


def _tell(returns: Sequence[JobReturn], first: int) -> None:
    for index, returned in enumerate(returns):
        if fails(returned):
            line = str(returned._return_value).strip().splitlines()[:1] or [type(returned._return_value).__name__]
            log.error(f"\t#{first + index} failed: {line[0]}")
