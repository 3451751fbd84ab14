"""Backend of hydra/launcher=hpc_local: points as processes of this machine, by submitit's local executor."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import time
from typing import Any

from omegaconf import DictConfig
from submitit.local.local import LocalJob

from hpc_train.errors import UserError
from hpc_train.launch.callables.local_executor import LocalCallExecutor, LocalJobs, count_fitting_jobs
from hpc_train.launch.callables.waiting import StartedJob
from hydra_plugins.hpc_train_launchers._config import HpcLocalConf
from hydra_plugins.hpc_train_launchers._point import RunPoint
from hydra_plugins.hpc_train_launchers._sweep import Points

_GRACE = 3.0
"""Seconds that points have to end when the sweep is cancelled."""
log = logging.getLogger(__name__)


class LocalBackend:
    """Backend of hydra/launcher=hpc_local."""

    def __init__(self, settings: HpcLocalConf) -> None:
        self._settings = settings
        self._jobs: dict[str, LocalJob[Any]] = {}

    @property
    def folder(self) -> str:
        """Setting `folder`."""
        return self._settings.folder

    def start(self, points: Points, config: DictConfig) -> list[StartedJob]:
        """Queue every point; the first ones start at once."""
        settings, parallel = self._settings, _choose_parallel_points(self._settings)
        python = shlex.join(settings.python) if settings.python else None
        executor = LocalCallExecutor(
            points.folder, settings.max_timeouts, python=python, at_once=parallel, max_attempts=settings.max_attempts
        )
        threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // (settings.ranks * parallel))
        executor.update_parameters(
            tasks_per_node=settings.ranks,
            timeout_min=settings.time_minutes or 0,
            signal_delay_s=settings.signal_seconds,
            stderr_to_stdout=True,
            setup=settings.setup,
            gpus_per_node=settings.gpus_per_point,
            environment={"OMP_NUM_THREADS": str(threads)},
        )
        count = len(points.pickled)
        log.info(f"{count} points on this machine, {parallel} at a time, {settings.ranks} ranks each")
        jobs = executor.submit_elements(RunPoint(points.file, tuple(range(count))), count)
        self._jobs = {job.job_id: job for job in jobs}
        return [StartedJob(job.job_id, settings.ranks) for job in jobs]

    def source(self) -> LocalJobs:
        """Return what tells how the jobs end."""
        return LocalJobs(self._jobs)

    def close(self) -> None:
        """Wait for the processes, which end once they have left their results."""
        processes: list[Any] = [job._process for job in self._jobs.values()]
        deadline = time.monotonic() + _GRACE
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.01)

    def cancel(self) -> None:
        """End all jobs; those that wait first, so that none of them starts in the place of one that ends."""
        processes: list[Any] = [job._process for job in self._jobs.values()]
        for process in sorted(processes, key=lambda process: process.pid):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while any(process.poll_processes() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            process.kill()


def _choose_parallel_points(settings: HpcLocalConf) -> int:
    """Return how many points run at a time. Raises UserError for what this machine does not have."""
    for name in ("ranks", "parallel_points", "gpus_per_point", "threads", "max_attempts", "time_minutes"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise UserError(f"hydra.launcher.{name}={value}: must be >= 1")
    try:
        fitting = count_fitting_jobs(settings.ranks, settings.gpus_per_point)
    except UserError as error:
        raise UserError(f"hydra.launcher.gpus_per_point={settings.gpus_per_point}: {error}") from None
    if settings.gpus_per_point is None:
        return settings.parallel_points or fitting
    return min(fitting, settings.parallel_points or fitting)
