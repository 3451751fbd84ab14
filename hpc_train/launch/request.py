"""From a run to what is asked of Slurm: plain data, nothing sent."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config.degrees import smallest_world
from hpc_train.config.launch import LaunchConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch import script
from hpc_train.launch.containers import container_of
from hpc_train.training.folder import RunFolder

if TYPE_CHECKING:
    from hpc_train.launch.code.snapshot import Snapshot

_NEVER = {
    "array": "a sweep is `hpc-train submit -m`",
    "wrap": "the script is ours; put shell lines in launch.setup",
    "hetjob": "heterogeneous jobs are not supported; give every rank the same resources",
    "het-group": "heterogeneous jobs are not supported; give every rank the same resources",
    "packjob": "heterogeneous jobs are not supported; give every rank the same resources",
    "export": "use launch.export",
    "export-file": "use launch.export",
    "parsable": "use `hpc-train submit --json`",
    "test-only": "use `hpc-train submit --dry-run`",
    "wait": "use `hpc-train status --watch`",
    "dependency": "use `hpc-train submit --after RUN`",
    "no-requeue": "use launch.max_attempts=1",
}
"""sbatch options that launch.extra cannot set, and what to do in place of them."""


@dataclass(frozen=True)
class Request:
    """What is asked of Slurm: the parameters of submitit's executor, and the command that runs in the job."""

    nodes: int
    ranks_per_node: int
    command: str
    parameters: dict[str, Any] = field(default_factory=dict)
    chain: int = 1
    """Jobs, each of which waits for the one before it."""
    export: tuple[str, ...] = ()
    """launch.export."""
    code: Snapshot | None = None
    """What the job imports from; None: what is installed."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def after(self, jobs: Sequence[str]) -> Request:
        """The same, to start only when these jobs (or arrays, or elements of them) have ended well."""
        if not jobs:
            return self
        wanted = ":".join(["afterok", *dict.fromkeys(jobs)])
        more = [word for word in (wanted, self.parameters.get("dependency")) if word]
        extra = {**self.parameters["additional_parameters"], "kill-on-invalid-dep": "yes"}
        parameters = {**self.parameters, "dependency": ",".join(more), "additional_parameters": extra}
        return replace(self, parameters=parameters)

    def held(self) -> Request:
        """The same, to start only when it is released."""
        extra = {**self.parameters["additional_parameters"], "hold": True}
        return replace(self, parameters={**self.parameters, "additional_parameters": extra})


def nodes_of(config: RunConfig) -> int:
    """cluster.nodes, else the fewest that the parallel degrees fit on. Raises UserError if the site has fewer."""
    cluster = config.cluster
    nodes = cluster.nodes or math.ceil(smallest_world(config.parallel) / cluster.ranks_per_node)
    if cluster.total_nodes and nodes > cluster.total_nodes:
        raise UserError(f"cluster.nodes={nodes}: {cluster.name} has {cluster.total_nodes}")
    return nodes


def make_request(config: RunConfig, folder: RunFolder, code: Snapshot | None = None) -> Request:
    """What this run asks of Slurm. Raises UserError for what the cluster cannot give, and for what cannot be quoted."""
    nodes, per_node = nodes_of(config), config.cluster.ranks_per_node
    options = sbatch_options(config, folder)
    container = container_of(config, folder, code.path if code else None)
    options["setup"] = [*script.before(config, folder, code.python_path if code else ()), *container.before]
    options["teardown"] = script.after(config)
    command, export = script.step(config, container), tuple(config.launch.export)
    return Request(nodes, per_node, command, options, config.launch.chain, export, code)


def sbatch_options(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """Everything for sbatch but the script, as parameters of submitit's executor. Raises UserError as make_request."""
    _check_time(config)
    _check_options(config.launch.extra)
    options = _resources(config, folder, nodes_of(config), config.cluster.ranks_per_node)
    _check_characters(config, folder, options)
    return options


def _file_pattern(path: Path) -> str:
    """A path as Slurm wants it where % introduces a pattern."""
    return str(path).replace("%", "%%")


def _check_options(options: dict[str, str]) -> None:
    for name in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UserError(f"launch.extra: {name!r} is not the long name of an sbatch option, such as mail-type")
        if name in _NEVER:
            raise UserError(f"launch.extra.{name}: cannot be set; {_NEVER[name]}")


def _check_characters(config: RunConfig, folder: RunFolder, options: dict[str, Any]) -> None:
    """A newline in a value would end its comment line, and the rest would run as shell."""
    values = {f"launch.{name}": value for name, value in options.items() if isinstance(value, str)}
    values |= {f"launch.extra.{name}": value for name, value in config.launch.extra.items()}
    values |= {"launch.reservation": config.launch.reservation or "", "run_dir": str(folder.path)}
    values |= {f"launch.setup[{index}]": line.replace("\t", " ") for index, line in enumerate(config.launch.setup)}
    for name, value in values.items():
        if not value.isprintable():
            raise UserError(f"{name.replace('job_name', 'name')}: {value!r} has a control character; leave it out")


def _resources(config: RunConfig, folder: RunFolder, nodes: int, per_node: int) -> dict[str, Any]:
    launch, site, node = config.launch, config.cluster.slurm, config.cluster.node
    wanted = {
        "job_name": _name(config, folder),
        "time": launch.time_minutes,
        "nodes": nodes,
        "ntasks_per_node": per_node,
        "cpus_per_task": script.cpus_of(config),
        "partition": launch.partition or site.partition,
        "constraint": launch.constraint or site.constraint,
        "account": launch.account,
        "qos": launch.qos,
        "exclude": launch.exclude,
        "mem": f"{round(launch.memory_gib * 1024)}M" if launch.memory_gib else None,
        "exclusive": True if site.exclusive else None,
        "gpus_per_node": node.gpus if node.gpus and site.gpu_request == "gpus_per_node" else None,
        "gres": f"gpu:{node.gpus}" if node.gpus and site.gpu_request == "gres" else None,
        "signal_delay_s": launch.signal_seconds,
        "dependency": "singleton" if launch.chain > 1 else None,
    }
    again = "requeue" if launch.max_attempts > 1 else "no-requeue"
    extra = {again: True, "output": _file_pattern(folder.path / "logs") + "/job-%j.log", **_extra(launch)}
    if launch.reservation:
        extra["reservation"] = launch.reservation
    fixed = {"wckey": None, "stderr_to_stdout": True, "use_srun": False, "additional_parameters": extra}
    return {key: value for key, value in wanted.items() if value is not None} | fixed


def _extra(launch: LaunchConfig) -> dict[str, Any]:
    """An empty value is that of an option that takes none, such as hold."""
    return {name: value or True for name, value in launch.extra.items()}


def _name(config: RunConfig, folder: RunFolder) -> str:
    """Jobs of a chain wait for those of the same name: it is the run's own."""
    if config.launch.chain == 1:
        return config.launch.name
    return f"{config.launch.name}-{hashlib.sha256(str(folder.path).encode()).hexdigest()[:8]}"


def _check_time(config: RunConfig) -> None:
    limit, asked = config.cluster.slurm.max_time_minutes, config.launch.time_minutes
    if limit is not None and asked > limit:
        raise UserError(
            f"launch.time_minutes={asked}: {config.cluster.name} allows {limit}; a job that stops is requeued"
        )
    if config.launch.signal_seconds >= asked * 60:
        raise UserError(
            f"launch.signal_seconds={config.launch.signal_seconds}: not before the end of a job of {asked} minutes; "
            "it would be told to stop at its start"
        )
