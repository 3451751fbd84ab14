"""Whether a partition can ever run a request, by what sinfo says, before sbatch is called; and what would fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.clients import Ask
from hpc_train.launch.request import Request
from hpc_train.launch.script import cpus_of

SINFO = ("sinfo", "--noheader", "--all", "--exact", "--format=%P|%a|%l|%D|%c|%m|%G")
_LIMIT = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:(),]+)?:(\d+)")


@dataclass(frozen=True)
class Hardware:
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


def parse(text: str) -> list[Hardware]:
    """What SINFO printed; a line of another form is nobody's."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 7 and all(fields[index].rstrip("+").isdecimal() for index in (3, 4, 5)):
            name, up, limit, nodes, cpus, memory, gres = fields
            found.append(
                Hardware(
                    name.rstrip("*"),
                    name.endswith("*"),
                    up.startswith("up"),
                    minutes(limit),
                    int(nodes.rstrip("+")),
                    int(cpus.rstrip("+")),
                    int(memory.rstrip("+")),
                    sum(int(count) for count in _GPUS.findall(gres)),
                )
            )
    return found


def minutes(limit: str) -> int | None:
    """Slurm's `days-hours:minutes:seconds` in minutes; None for `infinite` and what is no limit."""
    match = _LIMIT.fullmatch(limit)
    if match is None:
        return None
    days, hours, least, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + least + (1 if seconds and not (days or hours or least) else 0)


def check_partition(config: RunConfig, request: Request, ask: Ask) -> None:
    """Raise UserError, with what would fit, if the partition of this request can never run it.

    What sinfo does not say is left to sbatch.
    """
    said = ask(SINFO)
    everything = parse(said.out) if said.code == 0 else []
    names = request.parameters.get("partition")
    if not everything:
        return
    mine = [it for it in everything if (it.partition in names.split(",") if names else it.default)]
    if not mine and names:
        known = ", ".join(dict.fromkeys(it.partition for it in everything))
        raise UserError(f"launch.partition={names}: invalid partition; this cluster has {known}")
    if mine:
        _check(config, request, mine, everything)


def _check(config: RunConfig, request: Request, mine: Sequence[Hardware], everything: Iterable[Hardware]) -> None:
    name = "/".join(dict.fromkeys(it.partition for it in mine))
    others = _elsewhere(config, request, everything, mine)
    if not any(it.up for it in mine):
        raise UserError(f"launch.partition={name}: it is down{others}")
    asked = config.launch.time_minutes
    if all(it.minutes is not None and it.minutes < asked for it in mine):
        most = max(it.minutes or 0 for it in mine)
        raise UserError(
            f"launch.time_minutes={asked}: partition {name} allows {most}; use launch.time_minutes={most}, a run that "
            f"is not done by then saves and is requeued (or goes on in the next job of launch.chain=N){others}"
        )
    fitting = [it for it in mine if _fits(config, it)]
    if not fitting:
        raise UserError(f"{_lack(config, mine)}{others}")
    nodes = sum(it.nodes for it in fitting) if len({it.partition for it in fitting}) == 1 else _largest(fitting)
    if nodes < request.nodes:
        raise UserError(_too_many(request, name, nodes) + others)


def _largest(fitting: Sequence[Hardware]) -> int:
    names = {it.partition for it in fitting}
    return max(sum(it.nodes for it in fitting if it.partition == name) for name in names)


def _too_many(request: Request, name: str, nodes: int) -> str:
    per_node = request.ranks_per_node
    return (
        f"cluster.nodes={request.nodes}: partition {name} has {nodes} such nodes, at most {nodes * per_node} ranks "
        f"of {per_node} a node, and this run needs {request.ranks}; use cluster.nodes={nodes} with smaller degrees"
    )


def _needs(config: RunConfig) -> tuple[int, int, int]:
    """CPUs, MiB and GPUs of a node."""
    gpus = config.cluster.node.gpus if config.cluster.slurm.gpu_request != "none" else 0
    memory = round((config.launch.memory_gib or 0) * 1024)
    return (cpus_of(config) or 1) * config.cluster.ranks_per_node, memory, gpus


def _fits(config: RunConfig, it: Hardware) -> bool:
    cpus, memory, gpus = _needs(config)
    return it.cpus >= cpus and it.memory_mib >= memory and it.gpus >= gpus


def _lack(config: RunConfig, mine: Sequence[Hardware]) -> str:
    """What no node of the partition has enough of."""
    cpus, memory, gpus = _needs(config)
    name = "/".join(dict.fromkeys(it.partition for it in mine))
    most_cpus, most_memory = max(it.cpus for it in mine), max(it.memory_mib for it in mine)
    most_gpus = max(it.gpus for it in mine)
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
            f"{ranks} ranks of {cpus // ranks} CPUs a node: the nodes of partition {name} have {most_cpus}; "
            f"use launch.cpus_per_rank={max(1, most_cpus // ranks)} or fewer cluster.node.ranks"
        )
    return f"no node of partition {name} has {cpus} CPUs, {memory} MiB and {gpus} GPUs together"


def _elsewhere(config: RunConfig, request: Request, everything: Iterable[Hardware], mine: Sequence[Hardware]) -> str:
    """The other partitions that this request fits in."""
    tried = {it.partition for it in mine}
    fitting: dict[str, int] = {}
    for it in everything:
        long_enough = it.minutes is None or it.minutes >= config.launch.time_minutes
        if it.partition not in tried and it.up and long_enough and _fits(config, it):
            fitting[it.partition] = fitting.get(it.partition, 0) + it.nodes
    names = [name for name, nodes in fitting.items() if nodes >= request.nodes]
    return f"; it fits in partition {', '.join(names)}" if names else ""
