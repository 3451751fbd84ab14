"""Check whether a partition can ever run a request, before sbatch is called, and name what would fit instead.

Unless the site sets EnforcePartLimits, sbatch accepts a job beyond the limits of its partition, and the job then stays
pending for ever. What sbatch does refuse, it refuses in words that do not name the setting to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.slurm.batch_script import cpus_per_rank
from hpc_train.launch.slurm.request import JobRequest
from hpc_train.launch.slurm.slurm_cli import RunClient

SINFO_COMMAND = ("sinfo", "--noheader", "--all", "--exact", "--format=%P|%a|%l|%D|%c|%m|%G")
_TIME_LIMIT = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:(),]+)?:(\d+)")


@dataclass(frozen=True)
class PartitionNodes:
    """Nodes of one kind in one partition."""

    partition: str
    default: bool
    up: bool
    minutes: int | None
    """Longest time limit; None: no limit."""
    nodes: int
    cpus: int
    memory_mib: int
    gpus: int


def parse_sinfo(text: str) -> list[PartitionNodes]:
    """Parse what SINFO_COMMAND printed; lines of another form are skipped."""
    partitions = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 7 and all(fields[index].rstrip("+").isdecimal() for index in (3, 4, 5)):
            name, up, limit, nodes, cpus, memory, gres = fields
            partitions.append(
                PartitionNodes(
                    partition=name.rstrip("*"),
                    default=name.endswith("*"),
                    up=up.startswith("up"),
                    minutes=parse_minutes(limit),
                    nodes=int(nodes.rstrip("+")),
                    cpus=int(cpus.rstrip("+")),
                    memory_mib=int(memory.rstrip("+")),
                    gpus=sum(int(count) for count in _GPUS.findall(gres)),
                )
            )
    return partitions


def parse_minutes(limit: str) -> int | None:
    """Convert Slurm's `days-hours:minutes:seconds` to minutes; None for `infinite` and other words."""
    match = _TIME_LIMIT.fullmatch(limit)
    if match is None:
        return None
    days, hours, least, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + least + (1 if seconds and not (days or hours or least) else 0)


def check_partition(config: RunConfig, request: JobRequest, ask: RunClient) -> None:
    """Raise UserError, with what would fit, if the partition of this request can never run it.

    What sinfo does not say is left to sbatch.
    """
    answer = ask(SINFO_COMMAND)
    everything = parse_sinfo(answer.out) if answer.code == 0 else []
    names = request.parameters.get("partition")
    if not everything:
        return
    chosen = [nodes for nodes in everything if (nodes.partition in names.split(",") if names else nodes.default)]
    if not chosen and names:
        existing = ", ".join(dict.fromkeys(nodes.partition for nodes in everything))
        raise UserError(f"launch.partition={names}: invalid partition; this cluster has {existing}")
    if chosen:
        _check_hardware(config, request, chosen, everything)
        _check_excluded(config, request, chosen, ask)


def _check_excluded(config: RunConfig, request: JobRequest, chosen: Sequence[PartitionNodes], ask: RunClient) -> None:
    """Raise UserError if launch.exclude leaves fewer nodes of the one chosen partition than the job needs."""
    names, needed = {kind.partition for kind in chosen}, request.nodes + request.spares
    if not config.launch.exclude or len(names) > 1:
        return
    (name,) = names
    answer = ask((*SINFO_COMMAND, f"--nodes={config.launch.exclude}"))
    excluded = [kind for kind in parse_sinfo(answer.out) if kind.partition == name] if answer.code == 0 else []
    nodes = sum(kind.nodes for kind in chosen)
    left = nodes - sum(kind.nodes for kind in excluded)
    if left < needed:
        raise UserError(
            f"launch.exclude={config.launch.exclude}: leaves {left} of the {nodes} nodes of partition {name}, and this "
            f"run needs {needed}; exclude fewer, or use a smaller cluster.nodes"
        )


def _check_hardware(
    config: RunConfig, request: JobRequest, chosen: Sequence[PartitionNodes], everything: Iterable[PartitionNodes]
) -> None:
    """Raise UserError if no nodes of the chosen partitions can run the request; the message names others that can."""
    name = "/".join(dict.fromkeys(kind.partition for kind in chosen))
    others = _describe_other_partitions(config, request, everything, chosen)
    if not any(kind.up for kind in chosen):
        raise UserError(f"launch.partition={name}: it is down{others}")
    minutes = config.launch.time_minutes
    if all(kind.minutes is not None and kind.minutes < minutes for kind in chosen):
        longest = max(kind.minutes or 0 for kind in chosen)
        raise UserError(
            f"launch.time_minutes={minutes}: partition {name} allows {longest}; use launch.time_minutes={longest}, a "
            f"run that is not done by then saves and is requeued (or goes on in the next job of launch.chain=N){others}"
        )
    fitting = [kind for kind in chosen if _fits_on(config, kind)]
    if not fitting:
        raise UserError(f"{_describe_lack(config, chosen)}{others}")
    # A job runs in one partition, so that the nodes of several do not add up.
    nodes = (
        sum(kind.nodes for kind in fitting)
        if len({kind.partition for kind in fitting}) == 1
        else _largest_partition_size(fitting)
    )
    if nodes < request.nodes:
        raise UserError(_describe_too_few_nodes(request, name, nodes) + others)
    if nodes < request.nodes + request.spares:
        raise UserError(
            f"launch.spares={request.spares}: partition {name} has {nodes} suitable nodes, and the ranks need "
            f"{request.nodes} of them; use launch.spares={nodes - request.nodes}{others}"
        )


def _largest_partition_size(fitting: Sequence[PartitionNodes]) -> int:
    names = {kind.partition for kind in fitting}
    return max(sum(kind.nodes for kind in fitting if kind.partition == name) for name in names)


def _describe_too_few_nodes(request: JobRequest, name: str, nodes: int) -> str:
    per_node = request.ranks_per_node
    return (
        f"cluster.nodes={request.nodes}: partition {name} has {nodes} suitable nodes, for at most "
        f"{nodes * per_node} ranks at {per_node} per node; this run needs {request.ranks} ranks; "
        f"use cluster.nodes={nodes} with smaller degrees"
    )


def _count_needs_per_node(config: RunConfig) -> tuple[int, int, int]:
    """Return the CPUs, the MiB and the GPUs that the run takes on each node."""
    gpus = config.cluster.node.gpus if config.cluster.slurm.gpu_request != "none" else 0
    memory = round((config.launch.memory_gib or 0) * 1024)
    return (cpus_per_rank(config) or 1) * config.cluster.ranks_per_node, memory, gpus


def _fits_on(config: RunConfig, kind: PartitionNodes) -> bool:
    cpus, memory, gpus = _count_needs_per_node(config)
    return kind.cpus >= cpus and kind.memory_mib >= memory and kind.gpus >= gpus


def _describe_lack(config: RunConfig, chosen: Sequence[PartitionNodes]) -> str:
    """Describe what no node of the partition has enough of."""
    cpus, memory, gpus = _count_needs_per_node(config)
    name = "/".join(dict.fromkeys(kind.partition for kind in chosen))
    most_cpus, most_memory = max(kind.cpus for kind in chosen), max(kind.memory_mib for kind in chosen)
    most_gpus = max(kind.gpus for kind in chosen)
    if gpus > most_gpus:
        use = f"use cluster.node.gpus={most_gpus}" if most_gpus else "it has none"
        return f"cluster.node.gpus={gpus}: the nodes of partition {name} have {most_gpus}; {use}"
    if memory > most_memory:
        return (
            f"launch.memory_gib={config.launch.memory_gib:g}: the nodes of partition {name} have {most_memory / 1024:g}"
        )
    if cpus > most_cpus:
        ranks = config.cluster.ranks_per_node
        return (
            f"{ranks} ranks of {cpus // ranks} CPUs per node: the nodes of partition {name} have {most_cpus}; "
            f"use launch.cpus_per_rank={max(1, most_cpus // ranks)} or fewer cluster.node.ranks"
        )
    return f"no node of partition {name} has {cpus} CPUs, {memory} MiB and {gpus} GPUs together"


def _describe_other_partitions(
    config: RunConfig, request: JobRequest, everything: Iterable[PartitionNodes], chosen: Sequence[PartitionNodes]
) -> str:
    """Name the other partitions in which this request fits."""
    tried = {kind.partition for kind in chosen}
    fitting: dict[str, int] = {}
    for kind in everything:
        long_enough = kind.minutes is None or kind.minutes >= config.launch.time_minutes
        if kind.partition not in tried and kind.up and long_enough and _fits_on(config, kind):
            fitting[kind.partition] = fitting.get(kind.partition, 0) + kind.nodes
    names = [name for name, nodes in fitting.items() if nodes >= request.nodes + request.spares]
    return f"; it fits in partition {', '.join(names)}" if names else ""
