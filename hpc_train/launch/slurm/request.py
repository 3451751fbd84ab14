"""Turn a run into a request to Slurm, as plain data: sbatch options, lines of the batch script, command of the ranks.

Nothing is sent here: sbatch.py renders and submits a request, and partitions.py checks beforehand that it can ever run.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config.launch import LaunchConfig
from hpc_train.config.parallel import compute_smallest_world
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.slurm import batch_script
from hpc_train.launch.slurm.containers import make_container
from hpc_train.resilience.exclusion import choose_excluded, read_strikes
from hpc_train.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from hpc_train.launch.snapshot.code_snapshot import Snapshot

_FORBIDDEN_OPTIONS = {
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
class JobRequest:
    """A request to Slurm: the parameters of submitit's executor, and the command that runs in the job."""

    nodes: int
    ranks_per_node: int
    command: str
    parameters: dict[str, Any] = field(default_factory=dict)
    chain: int = 1
    """Jobs, each of which waits for the one before it."""
    export: tuple[str, ...] = ()
    """launch.export."""
    code: Snapshot | None = None
    """Snapshot that the job imports from; None: it imports what is installed."""
    spares: int = 0
    """Nodes that the job has beside `nodes`."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def after(self, jobs: Sequence[str]) -> JobRequest:
        """Return this request, to start only when these jobs (or arrays, or elements of them) have ended well."""
        if not jobs:
            return self
        # kill-on-invalid-dep: a job whose condition can never come true leaves the queue, and does not wait for ever.
        condition = ":".join(["afterok", *dict.fromkeys(jobs)])
        more = [word for word in (condition, self.parameters.get("dependency")) if word]
        extra = {**self.parameters["additional_parameters"], "kill-on-invalid-dep": "yes"}
        parameters = {**self.parameters, "dependency": ",".join(more), "additional_parameters": extra}
        return replace(self, parameters=parameters)

    def for_nodes(self, nodes: int, exclude: str) -> JobRequest:
        """Return this request for another number of nodes, spares included, on none of the host list `exclude`."""
        parameters = {name: value for name, value in self.parameters.items() if name != "exclude"}
        left_out = {"exclude": exclude} if exclude else {}
        return replace(self, spares=nodes - self.nodes, parameters={**parameters, **left_out, "nodes": nodes})

    def with_hold(self) -> JobRequest:
        """Return this request, to start only when it is released."""
        extra = {**self.parameters["additional_parameters"], "hold": True}
        return replace(self, parameters={**self.parameters, "additional_parameters": extra})


def node_count(config: RunConfig) -> int:
    """Return cluster.nodes, else the fewest nodes that the parallel degrees fit on.

    Raises UserError if the site has fewer.
    """
    cluster = config.cluster
    nodes = cluster.nodes or math.ceil(compute_smallest_world(config.parallel) / cluster.ranks_per_node)
    if cluster.total_nodes and nodes > cluster.total_nodes:
        raise UserError(f"cluster.nodes={nodes}: {cluster.name} has {cluster.total_nodes}; ask for fewer")
    if cluster.total_nodes and nodes + config.launch.spares > cluster.total_nodes:
        left = cluster.total_nodes - nodes
        raise UserError(
            f"launch.spares={config.launch.spares}: {cluster.name} has {left} nodes beside the {nodes} of the run; ask "
            "for fewer"
        )
    return nodes


def make_request(config: RunConfig, folder: RunDirectory, code: Snapshot | None = None) -> JobRequest:
    """Build the request of a run.

    Raises UserError for what the cluster cannot give, and for values that cannot be quoted.
    """
    nodes, per_node = node_count(config), config.cluster.ranks_per_node
    options = sbatch_options(config, folder, list_nodes_to_exclude(config, folder))
    container = make_container(config, folder, code.path if code else None)
    options["setup"] = [
        *batch_script.lines_before_ranks(config, folder, nodes, code.python_path if code else ()),
        *container.before,
        *batch_script.define_start(batch_script.srun_line(config, container)),
    ]
    options["teardown"] = [batch_script.LINE_AFTER_RANKS]
    export = tuple(config.launch.export)
    return JobRequest(
        nodes=nodes,
        ranks_per_node=per_node,
        command=batch_script.START_RANKS,
        parameters=options,
        chain=config.launch.chain,
        export=export,
        code=code,
        spares=config.launch.spares,
    )


def list_nodes_to_exclude(config: RunConfig, folder: RunDirectory) -> list[str]:
    """Return the nodes that a job of this run leaves out because of strikes in earlier jobs, the worst first."""
    return choose_excluded(read_strikes(folder.path), node_count(config)) if config.resilience.act else []


def sbatch_options(config: RunConfig, folder: RunDirectory, excluded: Sequence[str] = ()) -> dict[str, Any]:
    """Return everything for sbatch but the script, as parameters of submitit's executor.

    excluded: nodes to leave out in addition to launch.exclude. Raises UserError as make_request.
    """
    _check_time(config)
    _check_options(config.launch.extra)
    options = _resource_options(config, folder, excluded)
    _check_characters(config, folder, options)
    return options


def _file_pattern(path: Path) -> str:
    """Escape a path for options in which % starts a pattern."""
    return str(path).replace("%", "%%")


def _check_options(options: dict[str, str]) -> None:
    for name in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UserError(f"launch.extra: {name!r} is not the long name of an sbatch option, such as mail-type")
        if name in _FORBIDDEN_OPTIONS:
            raise UserError(f"launch.extra.{name}: cannot be set; {_FORBIDDEN_OPTIONS[name]}")


def _check_characters(config: RunConfig, folder: RunDirectory, options: dict[str, Any]) -> None:
    """Refuse control characters. After a newline in an #SBATCH line, the rest of the value would run as shell."""
    values = {f"launch.{name}": value for name, value in options.items() if isinstance(value, str)}
    values |= {f"launch.extra.{name}": value for name, value in config.launch.extra.items()}
    values |= {"launch.reservation": config.launch.reservation or "", "run_dir": str(folder.path)}
    # A tab is a control character, too, and usual in shell lines.
    values |= {f"launch.setup[{index}]": line.replace("\t", " ") for index, line in enumerate(config.launch.setup)}
    for name, value in values.items():
        if not value.isprintable():
            raise UserError(f"{name.replace('job_name', 'name')}: {value!r} has a control character; leave it out")


def join_excluded(config: RunConfig, excluded: Sequence[str]) -> str:
    """Return the value of sbatch's --exclude: launch.exclude and these nodes; "" for none."""
    return ",".join(filter(None, [config.launch.exclude, *excluded]))


def _resource_options(config: RunConfig, folder: RunDirectory, excluded: Sequence[str]) -> dict[str, Any]:
    """Return submitit's parameters for sbatch. excluded: nodes to leave out besides launch.exclude."""
    launch, site, node = config.launch, config.cluster.slurm, config.cluster.node
    options = {
        "job_name": _job_name(config, folder),
        "time": launch.time_minutes,
        "nodes": node_count(config) + launch.spares,
        "ntasks_per_node": config.cluster.ranks_per_node,
        "cpus_per_task": batch_script.cpus_per_rank(config),
        "partition": launch.partition or site.partition,
        "constraint": launch.constraint or site.constraint,
        "account": launch.account,
        "qos": launch.qos,
        "exclude": join_excluded(config, excluded) or None,
        "mem": f"{round(launch.memory_gib * 1024)}M" if launch.memory_gib else None,
        "exclusive": True if site.exclusive else None,
        "gpus_per_node": node.gpus if node.gpus and site.gpu_request == "gpus_per_node" else None,
        "gres": f"gpu:{node.gpus}" if node.gpus and site.gpu_request == "gres" else None,
        "signal_delay_s": launch.signal_seconds,  # submitit makes it --signal=USR2@<seconds>
        # singleton: one at a time of this user's jobs of this name.
        "dependency": "singleton" if launch.chain > 1 else None,
    }
    requeue = "requeue" if launch.max_attempts > 1 else "no-requeue"
    extra = {
        requeue: True,
        "output": _file_pattern(folder.path / "logs") + "/job-%j.log",
        **_extra_options(launch),
    }
    loses = launch.spares or config.resilience.elastic.min_nodes or config.parallel.sync.lost_after_seconds is not None
    # A node that dies must not end the job. One without other nodes than the batch script's ends with it in any case.
    if loses and node_count(config) + launch.spares > 1:
        extra["no-kill"] = True
    if launch.reservation:
        extra["reservation"] = launch.reservation
    # use_srun: the script has its own srun line. wckey: else submitit sets one, its own name.
    fixed = {"wckey": None, "stderr_to_stdout": True, "use_srun": False, "additional_parameters": extra}
    return {key: value for key, value in options.items() if value is not None} | fixed


def _extra_options(launch: LaunchConfig) -> dict[str, Any]:
    """Return launch.extra; an empty value means an option without one, such as hold."""
    return {name: value or True for name, value in launch.extra.items()}


def _job_name(config: RunConfig, folder: RunDirectory) -> str:
    """Return launch.name; of a chain, with a hash of the run, as its jobs wait for each other by their name."""
    if config.launch.chain == 1:
        return config.launch.name
    return f"{config.launch.name}-{hashlib.sha256(str(folder.path).encode()).hexdigest()[:8]}"


def _check_time(config: RunConfig) -> None:
    limit, minutes = config.cluster.slurm.max_time_minutes, config.launch.time_minutes
    if limit is not None and minutes > limit:
        raise UserError(
            f"launch.time_minutes={minutes}: {config.cluster.name} allows {limit}; lower it: a job that reaches its "
            "limit saves and is requeued"
        )
    if config.launch.signal_seconds >= minutes * 60:
        raise UserError(
            f"launch.signal_seconds={config.launch.signal_seconds}: not before the end of a job of {minutes} minutes; "
            "it would be told to stop at its start"
        )
