"""What a point asks of Slurm: what the launcher's settings say, and where they say nothing, what the point itself does.

A point that is a configuration of hpc_train has parallel degrees and a cluster, from which its nodes follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.check import check_group
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.launch import LaunchConfig
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.slurm.request import JobRequest, check_partition, node_count, sbatch_options
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.training.run_directory import RunDirectory
from hydra_plugins.hpc_train_launchers._config import HpcSlurmConf

_SAME = (
    *("name", "time_minutes", "partition", "account", "qos", "constraint", "reservation", "exclude", "cpus_per_rank"),
    *("memory_gib", "signal_seconds", "max_attempts", "export", "extra", "setup"),
)
"""Settings that mean the same in conf/launch."""
_NAMES = {
    "cluster.nodes": "nodes",
    "cluster.node.ranks": "ranks_per_node",
    "cluster.node.gpus": "gpus_per_node",
    "launch": "",
}


@dataclass(frozen=True)
class Shape:
    """The resources of a point: equal ones go into one array."""

    nodes: int
    ranks_per_node: int
    options: dict[str, Any]
    """Parameters of submitit's executor."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def shape_of(settings: HpcSlurmConf, point: DictConfig, folder: Path) -> Shape:
    """What this point needs. Raises UserError for what makes no sense, in the launcher's own words."""
    ours = _ours(point)
    try:
        config = _run_config(settings, ours)
        nodes, per_node = node_count(config), config.cluster.ranks_per_node
        if ours is not None:
            resolve_degrees(config.parallel, nodes * per_node)
        options = sbatch_options(config, RunDirectory(folder, folder))
    except UserError as error:
        raise UserError(in_our_words(str(error), ours is not None)) from None
    return Shape(nodes, per_node, _for_functions(options, settings))


def what_it_says(point: DictConfig) -> str:
    """All that a point itself says of its resources: points that say the same need the same."""
    if not {"cluster", "parallel"} <= point.keys():
        return ""
    return OmegaConf.to_yaml(OmegaConf.masked_copy(point, ["cluster", "parallel"]), resolve=True)


def check_shape(settings: HpcSlurmConf, shape: Shape, point: DictConfig, ask: RunClient) -> None:
    """Raise UserError if the partition can never give it, with what would fit."""
    ours = _ours(point)
    try:
        check_partition(
            _run_config(settings, ours), JobRequest(shape.nodes, shape.ranks_per_node, "", shape.options), ask
        )
    except UserError as error:
        raise UserError(in_our_words(str(error), ours is not None)) from None


def in_our_words(text: str, ours: bool) -> str:
    """An error message of the command line, with the names of the launcher's settings."""
    text = re.sub(r"\blaunch\.", "hydra.launcher.", text)
    if not ours:
        for theirs, name in _NAMES.items():
            text = re.sub(rf"\b{re.escape(theirs)}\b(?=[= ])", f"hydra.launcher.{name}", text) if name else text
    return text


def _ours(point: DictConfig) -> tuple[ClusterConfig, ParallelConfig] | None:
    """The cluster and the degrees of a point that has them; None of any other application's."""
    if not {"cluster", "parallel"} <= point.keys():
        return None
    try:
        return _typed(ClusterConfig, point.cluster), _typed(ParallelConfig, point.parallel)
    except (OmegaConfBaseException, ValueError):
        return None


def _typed(kind: type[Any], node: Any) -> Any:
    plain = OmegaConf.create(OmegaConf.to_container(node, resolve=True))
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), plain))


def _run_config(it: HpcSlurmConf, ours: tuple[ClusterConfig, ParallelConfig] | None) -> RunConfig:
    cluster, parallel = ours or (ClusterConfig(name="the cluster"), ParallelConfig(dp_replicate=1))
    given = {"gpus": it.gpus_per_node, "ranks": it.ranks_per_node}
    node = replace(cluster.node, **_known(given))
    if ours is None and it.ranks_per_node is None:
        node.ranks = 1
    site = replace(cluster.slurm, **_known({"exclusive": it.exclusive, "gpu_request": it.gpu_request}))
    nodes = next((known for known in (it.nodes, cluster.nodes, None if ours else 1) if known is not None), None)
    launch = LaunchConfig(kind="slurm", **{name: getattr(it, name) for name in _SAME})
    config = RunConfig(cluster=replace(cluster, node=node, slurm=site, nodes=nodes), parallel=parallel, launch=launch)
    for name in ("cluster", "launch"):
        check_group(getattr(config, name), f"{name}.")
    return config


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _for_functions(options: dict[str, Any], settings: HpcSlurmConf) -> dict[str, Any]:
    """The same for a job of functions: srun and logs are submitit's business there."""
    extra = {name: value for name, value in options["additional_parameters"].items() if name != "output"}
    return {
        **options,
        "additional_parameters": extra,
        "use_srun": True,
        "srun_args": list(settings.srun),
        "setup": list(settings.setup),
    }
