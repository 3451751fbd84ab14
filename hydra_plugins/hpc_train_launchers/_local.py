"""Points on this machine."""

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
from hpc_train.launch.callables.local_executor import LocalCallExecutor, LocalJobs, max_parallel_jobs, visible_devices
from hpc_train.launch.callables.waiting import StartedJob
from hydra_plugins.hpc_train_launchers._config import HpcLocalConf
from hydra_plugins.hpc_train_launchers._point import RunPoint
from hydra_plugins.hpc_train_launchers._sweep import Points

_GRACE = 3.0
"""Seconds that points have to end when the sweep is cancelled."""
log = logging.getLogger(__name__)


class LocalPoints:
    """Backend of hydra/launcher=hpc_local."""

    def __init__(self, settings: HpcLocalConf) -> None:
        self._settings = settings
        self._jobs: dict[str, LocalJob[Any]] = {}

    @property
    def folder(self) -> str:
        return self._settings.folder

    def start(self, points: Points, config: DictConfig) -> list[StartedJob]:
        """Queue every point; the first ones start at once."""
        it, at_once = self._settings, _at_once(self._settings)
        python = shlex.join(it.python) if it.python else None
        executor = LocalCallExecutor(
            points.folder, it.max_timeouts, python=python, at_once=at_once, max_attempts=it.max_attempts
        )
        threads = it.threads or max(1, len(os.sched_getaffinity(0)) // (it.ranks * at_once))
        executor.update_parameters(
            tasks_per_node=it.ranks,
            timeout_min=it.time_minutes or 0,
            signal_delay_s=it.signal_seconds,
            stderr_to_stdout=True,
            setup=it.setup,
            gpus_per_node=it.gpus_per_point,
            environment={"OMP_NUM_THREADS": str(threads)},
        )
        count = len(points.blobs)
        log.info(f"{count} points on this machine, {at_once} at a time, {it.ranks} ranks each")
        jobs = executor.submit_elements(RunPoint(points.parcel, tuple(range(count))), count)
        self._jobs = {job.job_id: job for job in jobs}
        return [StartedJob(job.job_id, it.ranks) for job in jobs]

    def source(self) -> LocalJobs:
        return LocalJobs(self._jobs)

    def cancel(self) -> None:
        """First those that wait, so that none of them starts in the place of one that ends."""
        processes: list[Any] = [job._process for job in self._jobs.values()]
        for process in sorted(processes, key=lambda it: it.pid):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while any(process.look() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            process.kill()


def _at_once(it: HpcLocalConf) -> int:
    """Raises UserError for what this machine has not."""
    for name in ("ranks", "parallel_points", "gpus_per_point", "threads", "max_attempts", "time_minutes"):
        if (value := getattr(it, name)) is not None and value < 1:
            raise UserError(f"hydra.launcher.{name}={value}: must be >= 1")
    if it.gpus_per_point is None:
        return it.parallel_points or max_parallel_jobs(it.ranks)
    room = len(visible_devices()) // it.gpus_per_point
    if not room:
        raise UserError(
            f"hydra.launcher.gpus_per_point={it.gpus_per_point}: {len(visible_devices())} GPUs are visible here"
        )
    return min(room, it.parallel_points or room)
