"""Points as elements of sbatch arrays: one for each shape of resources, cut where the site allows no larger one."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from hpc_train.errors import UserError
from hpc_train.launch.callables.slurm_executor import SlurmCallExecutor
from hpc_train.launch.callables.waiting import SlurmJobs, StartedJob
from hpc_train.launch.slurm.sbatch import job_environment
from hpc_train.launch.slurm.slurm_cli import max_array_size, run_client, split_evenly
from hydra_plugins.hpc_train_launchers._config import HpcSlurmConf
from hydra_plugins.hpc_train_launchers._point import RunPoint
from hydra_plugins.hpc_train_launchers._resources import Shape, check_shape, in_our_words, shape_of, what_it_says
from hydra_plugins.hpc_train_launchers._sweep import Points

_NAMED = re.compile(rb"oc\.env:\s*([A-Za-z_]\w*)")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Array:
    """Points that go into one array."""

    shape: Shape
    points: tuple[int, ...]


class SlurmPoints:
    """Backend of hydra/launcher=hpc_slurm."""

    def __init__(self, settings: HpcSlurmConf) -> None:
        self._settings = settings
        self._bases: list[str] = []

    @property
    def folder(self) -> str:
        return self._settings.folder

    def start(self, points: Points, config: DictConfig) -> list[StartedJob]:
        """Submit all arrays; the caller cancels those that there are when one is refused."""
        arrays = self._arrays(points)
        environment = self._environment(points, config)
        started: dict[int, StartedJob] = {}
        for array, at_once, waits in zip(arrays, *throttles(arrays, self._settings.parallel_points), strict=True):
            jobs = self._submit(points, array, environment, at_once, self._bases[waits] if waits is not None else None)
            self._bases.append(jobs[0].partition("_")[0])
            it = array.shape
            log.info(f"job {self._bases[-1]}: {len(jobs)} points, nodes {it.nodes} x ranks {it.ranks_per_node}")
            started |= {point: StartedJob(job, it.ranks) for point, job in zip(array.points, jobs, strict=True)}
        return [started[index] for index in range(len(points.blobs))]

    def source(self) -> SlurmJobs:
        return SlurmJobs(run_client)

    def cancel(self) -> None:
        """Of jobs that have ended, scancel does nothing."""
        if self._bases:
            run_client(["scancel", *self._bases])

    def _arrays(self, points: Points) -> list[Array]:
        known: dict[str, Shape] = {}
        shapes: dict[str, tuple[Shape, list[int]]] = {}
        for index in range(len(points.blobs)):
            config = points.config(index)
            said = what_it_says(config)
            shape = known[said] = known.get(said) or shape_of(self._settings, config, points.folder)
            key = json.dumps([shape.nodes, shape.ranks_per_node, shape.options], sort_keys=True)
            shapes.setdefault(key, (shape, []))[1].append(index)
        most = max(1, max_array_size(run_client))
        for shape, members in shapes.values():
            check_shape(self._settings, shape, points.config(members[0]), run_client)
        return [
            Array(shape, tuple(members[index] for index in part))
            for shape, members in shapes.values()
            for part in split_evenly(len(members), most)
        ]

    def _environment(self, points: Points, config: DictConfig) -> dict[str, str]:
        """What launch.export allows, what Hydra was told to copy, and what the configuration reads itself."""
        asked = [name for name in config.hydra.job.env_copy or () if name in os.environ]
        named = {match.decode() for blob in points.blobs for match in _NAMED.findall(blob)}
        try:
            return job_environment([*self._settings.export, *asked, *sorted(named & os.environ.keys())])
        except UserError as error:
            raise UserError(in_our_words(str(error), ours=False)) from None

    def _submit(
        self, points: Points, array: Array, environment: dict[str, str], at_once: int, after: str | None
    ) -> list[str]:
        it = self._settings
        executor = SlurmCallExecutor(
            points.folder,
            it.max_timeouts,
            python=shlex.join(it.python) if it.python else None,
            environment=environment,
            max_attempts=it.max_attempts,
        )
        waits = {"dependency": f"afterany:{after}"} if after else {}
        executor.update_parameters(**{**array.shape.options, "array_parallelism": at_once, **waits})
        return executor.submit_elements(RunPoint(points.parcel, array.points), len(array.points))


def throttles(arrays: Sequence[Array], most: int | None) -> tuple[list[int], list[int | None]]:
    """How many of each array run at once, and which array each waits for, so that never more than `most` points run."""
    sizes = [len(array.points) for array in arrays]
    if most is None or sum(sizes) <= most:
        return sizes, [None] * len(sizes)
    if most < 1:
        raise UserError(f"hydra.launcher.parallel_points={most}: must be >= 1")
    lanes = min(most, len(sizes))
    share = [most // lanes + (index < most % lanes) for index in range(lanes)]
    waits = [index - lanes if index >= lanes else None for index in range(len(sizes))]
    return [share[index % lanes] for index in range(len(sizes))], waits
