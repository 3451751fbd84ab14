"""Points as elements of sbatch arrays: one array for all with equal resources, several where it would be too large."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.checks.check import check_group
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.launch import LaunchConfig
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.callables.slurm_executor import SlurmCallExecutor
from hpc_train.launch.callables.waiting import SlurmJobs, StartedJob
from hpc_train.launch.slurm.array_size import max_array_size, split_evenly
from hpc_train.launch.slurm.job_environment import job_environment
from hpc_train.launch.slurm.partitions import check_partition
from hpc_train.launch.slurm.request import JobRequest, node_count, sbatch_options
from hpc_train.launch.slurm.slurm_cli import RunClient, run_client
from hpc_train.training.run_directory import RunDirectory
from hydra_plugins.hpc_train_launchers._config import HpcSlurmConf
from hydra_plugins.hpc_train_launchers._point import RunPoint
from hydra_plugins.hpc_train_launchers._sweep import Points

_LAUNCH_SETTINGS = (
    *("name", "time_minutes", "partition", "account", "qos", "constraint", "reservation", "exclude", "cpus_per_rank"),
    *("memory_gib", "signal_seconds", "max_attempts", "export", "extra", "setup"),
)
"""Settings of the launcher that have the name and meaning of those in conf/launch."""
_OTHER_NAMES = {
    "cluster.nodes": "nodes",
    "cluster.node.ranks": "ranks_per_node",
    "cluster.node.gpus": "gpus_per_node",
}
"""Keys that messages about an hpc_train configuration name, and what the launcher calls the same."""
_NAMED_VARIABLE = re.compile(rb"oc\.env:\s*([A-Za-z_]\w*)")
"""Searched for in pickled configurations, in which text stays readable."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PointResources:
    """The resources of a point; points with equal resources go into one array."""

    nodes: int
    ranks_per_node: int
    options: dict[str, Any]
    """Parameters of submitit's executor."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class PointArray:
    """Points that go into one array."""

    resources: PointResources
    points: tuple[int, ...]


class SlurmBackend:
    """Backend of hydra/launcher=hpc_slurm."""

    def __init__(self, settings: HpcSlurmConf) -> None:
        self._settings = settings
        self._bases: list[str] = []

    @property
    def folder(self) -> str:
        """Setting `folder`."""
        return self._settings.folder

    def start(self, points: Points, config: DictConfig) -> list[StartedJob]:
        """Submit all arrays, and return the job of each point; where one is refused, the caller cancels the others."""
        arrays = self._group_into_arrays(points)
        environment = self._choose_environment(points, config)
        started: dict[int, StartedJob] = {}
        limits, followed = share_parallel_points(arrays, self._settings.parallel_points)
        for array, limit, waits in zip(arrays, limits, followed, strict=True):
            jobs = self._submit(points, array, environment, limit, self._bases[waits] if waits is not None else None)
            self._bases.append(jobs[0].partition("_")[0])
            resources = array.resources
            shape = f"nodes {resources.nodes} x ranks {resources.ranks_per_node}"
            log.info(f"job {self._bases[-1]}: {len(jobs)} points, {shape}")
            started |= {point: StartedJob(job, resources.ranks) for point, job in zip(array.points, jobs, strict=True)}
        return [started[index] for index in range(len(points.pickled))]

    def source(self) -> SlurmJobs:
        """Return what tells how the jobs end."""
        return SlurmJobs(run_client)

    def close(self) -> None:
        """Do nothing: the jobs are Slurm's."""

    def cancel(self) -> None:
        """Cancel all jobs of the sweep; scancel ignores those that have ended."""
        if self._bases:
            run_client(["scancel", *self._bases])

    def _group_into_arrays(self, points: Points) -> list[PointArray]:
        """Group the points by their resources, and cut the groups where the site allows no larger array."""
        by_settings: dict[str, PointResources] = {}
        groups: dict[str, tuple[PointResources, list[int]]] = {}
        for index in range(len(points.pickled)):
            config = points.read_config(index)
            text = select_resource_settings(config)
            resources = by_settings.get(text) or choose_resources(self._settings, config, points.folder)
            by_settings[text] = resources
            key = json.dumps([resources.nodes, resources.ranks_per_node, resources.options], sort_keys=True)
            groups.setdefault(key, (resources, []))[1].append(index)
        max_elements = max(1, max_array_size(run_client))
        for resources, members in groups.values():
            check_resources(self._settings, resources, points.read_config(members[0]), run_client)
        return [
            PointArray(resources, tuple(members[index] for index in part))
            for resources, members in groups.values()
            for part in split_evenly(len(members), max_elements)
        ]

    def _choose_environment(self, points: Points, config: DictConfig) -> dict[str, str]:
        """Return the variables of the jobs: what launch.export allows, what Hydra was told to copy, and what the
        configuration reads itself.
        """
        copied = [name for name in config.hydra.job.env_copy or () if name in os.environ]
        named = {match.decode() for blob in points.pickled for match in _NAMED_VARIABLE.findall(blob)}
        try:
            return job_environment([*self._settings.export, *copied, *sorted(named & os.environ.keys())])
        except UserError as error:
            raise UserError(use_launcher_names(str(error), own=False)) from None

    def _submit(
        self, points: Points, array: PointArray, environment: dict[str, str], limit: int, after: str | None
    ) -> list[str]:
        settings = self._settings
        executor = SlurmCallExecutor(
            points.folder,
            settings.max_timeouts,
            python=shlex.join(settings.python) if settings.python else None,
            environment=environment,
            max_attempts=settings.max_attempts,
        )
        waits = {"dependency": f"afterany:{after}"} if after else {}
        executor.update_parameters(**{**array.resources.options, "array_parallelism": limit, **waits})
        return executor.submit_elements(RunPoint(points.file, array.points), len(array.points))


def share_parallel_points(arrays: Sequence[PointArray], limit: int | None) -> tuple[list[int], list[int | None]]:
    """Return how many points of each array run at a time, and which array each waits for; at most `limit` points run.

    None: no limit.
    """
    sizes = [len(array.points) for array in arrays]
    if limit is None or sum(sizes) <= limit:
        return sizes, [None] * len(sizes)
    if limit < 1:
        raise UserError(f"hydra.launcher.parallel_points={limit}: must be >= 1")
    # A lane is a chain of arrays that follow one another; the lanes run side by side and share the limit.
    lanes = min(limit, len(sizes))
    share = [limit // lanes + (index < limit % lanes) for index in range(lanes)]
    waits = [index - lanes if index >= lanes else None for index in range(len(sizes))]
    return [share[index % lanes] for index in range(len(sizes))], waits


def choose_resources(settings: HpcSlurmConf, point: DictConfig, folder: Path) -> PointResources:
    """Return what this point asks of Slurm. Raises UserError in the launcher's own words for what makes no sense.

    Where the settings say nothing, a configuration of hpc_train says it itself: its nodes follow from its parallel
    degrees and its cluster.
    """
    own = _read_own_settings(point)
    try:
        config = _make_run_config(settings, own)
        nodes, per_node = node_count(config), config.cluster.ranks_per_node
        if own is not None:
            resolve_degrees(config.parallel, nodes * per_node)
        options = sbatch_options(config, RunDirectory(folder, folder))
    except UserError as error:
        raise UserError(use_launcher_names(str(error), own is not None)) from None
    return PointResources(nodes, per_node, _make_call_options(options, settings))


def select_resource_settings(point: DictConfig) -> str:
    """Return all that a point says of its resources, as text: points with the same text need the same."""
    if not {"cluster", "parallel"} <= point.keys():
        return ""
    return OmegaConf.to_yaml(OmegaConf.masked_copy(point, ["cluster", "parallel"]), resolve=True)


def check_resources(settings: HpcSlurmConf, resources: PointResources, point: DictConfig, ask: RunClient) -> None:
    """Raise UserError, with what would fit, if the partition can never give these resources."""
    own = _read_own_settings(point)
    try:
        request = JobRequest(resources.nodes, resources.ranks_per_node, "", resources.options)
        check_partition(_make_run_config(settings, own), request, ask)
    except UserError as error:
        raise UserError(use_launcher_names(str(error), own is not None)) from None


def use_launcher_names(text: str, own: bool) -> str:
    """Rewrite an error message of the command line with the names of the launcher's settings."""
    text = re.sub(r"\blaunch\.", "hydra.launcher.", text)
    if not own:
        for theirs, name in _OTHER_NAMES.items():
            text = re.sub(rf"\b{re.escape(theirs)}\b(?=[= ])", f"hydra.launcher.{name}", text)
    return text


def _read_own_settings(point: DictConfig) -> tuple[ClusterConfig, ParallelConfig] | None:
    """Return the cluster and the degrees of a configuration of hpc_train; None for any other application's."""
    if not {"cluster", "parallel"} <= point.keys():
        return None
    try:
        return _make_typed(ClusterConfig, point.cluster), _make_typed(ParallelConfig, point.parallel)
    except (OmegaConfBaseException, ValueError):
        return None


def _make_typed(kind: type[Any], node: Any) -> Any:
    plain = OmegaConf.create(OmegaConf.to_container(node, resolve=True))
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), plain))


def _make_run_config(settings: HpcSlurmConf, own: tuple[ClusterConfig, ParallelConfig] | None) -> RunConfig:
    cluster, parallel = own or (ClusterConfig(name="the cluster"), ParallelConfig(dp_replicate=1))
    given = {"gpus": settings.gpus_per_node, "ranks": settings.ranks_per_node}
    node = replace(cluster.node, **_drop_none(given))
    if own is None and settings.ranks_per_node is None:
        node.ranks = 1
    site = replace(cluster.slurm, **_drop_none({"exclusive": settings.exclusive, "gpu_request": settings.gpu_request}))
    nodes = next((count for count in (settings.nodes, cluster.nodes, None if own else 1) if count is not None), None)
    launch = LaunchConfig(kind="slurm", **{name: getattr(settings, name) for name in _LAUNCH_SETTINGS})
    config = RunConfig(cluster=replace(cluster, node=node, slurm=site, nodes=nodes), parallel=parallel, launch=launch)
    for name in ("cluster", "launch"):
        check_group(getattr(config, name), f"{name}.")
    return config


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _make_call_options(options: dict[str, Any], settings: HpcSlurmConf) -> dict[str, Any]:
    """Return the options for a job of callables: srun and logs are submitit's business there."""
    extra = {name: value for name, value in options["additional_parameters"].items() if name != "output"}
    return {
        **options,
        "additional_parameters": extra,
        "use_srun": True,
        "srun_args": list(settings.srun),
        "setup": list(settings.setup),
    }
