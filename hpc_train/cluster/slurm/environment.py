"""A dump of Slurm's environment variables: the nodes of a job, and what it says of where one hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hpc_train.cluster.slurm.address import cluster_of_paths, path
from hpc_train.cluster.slurm.records import names
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

LARGEST = 1 << 18
"""Nodes of a job."""

_NAME = r"[ \t]*(?:[0-9]+:[ \t]*)?(?:export[ \t]+|declare[ \t]+-x[ \t]+)?(SLURMD?_\w*)"
_LINE = re.compile(rf"{_NAME}(?:=(.*))?", re.DOTALL)
_FIRST = re.compile(rf"^{_NAME}=", re.MULTILINE)
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"


def matches(text: str) -> bool:
    """Whether a line sets a variable of Slurm's."""
    return bool(_FIRST.search(text))


def read(text: str, name: str) -> Cluster:
    """The job's nodes in Slurm's order; kind slurm_environment. Each SLURM_TOPOLOGY_ADDR adds the switches of its node.

    Takes `NAME=value`, `export NAME=value`, `declare -x NAME="value"` and srun's labels, one node's or several one
    after the other. Raises UserError `FILE:LINE: ...` for a line cut short, two different lists of nodes, or a number
    of nodes that no list has.
    """
    found: dict[str, dict[str, int]] = {}
    for line, variable, value in _variables(text, name):
        found.setdefault(variable, {}).setdefault(value, line)
    nodes = _nodes(found, name)
    for value, line in found.get("SLURM_TASKS_PER_NODE", {}).items():
        _at(name, line, value)
    paths: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
    pattern = next(iter(found.get(_PATTERN, {"": 0})))
    for address, line in found.get("SLURM_TOPOLOGY_ADDR", {}).items():
        node = _node_of(address, nodes)
        if node is None:
            raise UserError(f"{name}:{line}: SLURM_TOPOLOGY_ADDR={address[:80]} ends in no node of the job")
        paths[node] = path(address, pattern, node)
    shown = cluster_of_paths(paths)
    return Cluster("slurm_environment", shown.nodes, switches=shown.switches)


def tasks_per_node(text: str) -> list[int]:
    """SLURM_TASKS_PER_NODE, such as `34,26,2(x2)`, as one number a node. UserError for another form."""
    tasks: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\s*", piece)
        if not found:
            raise UserError(f"SLURM_TASKS_PER_NODE={text[:60]}; expected such as 34,26,2(x2)")
        times = int(found[2] or 1)
        if len(tasks) + times > LARGEST:
            raise UserError(f"SLURM_TASKS_PER_NODE={text[:60]}: more than {LARGEST} nodes")
        tasks += [int(found[1])] * times
    return tasks


def _variables(text: str, name: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        found = _LINE.fullmatch(line.rstrip("\r"))
        if not found:
            continue
        if found[2] is None:
            raise UserError(f"{name}:{number}: {line[:60]!r}; expected NAME=VALUE (is the text cut short?)")
        yield number, found[1], _unquoted(found[2].strip())


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _nodes(found: Mapping[str, Mapping[str, int]], name: str) -> tuple[str, ...]:
    lists: dict[str, tuple[str, ...]] = {}
    for variable in _LISTS:
        values = found.get(variable, {})
        if variable != "SLURM_STEP_NODELIST" and len(values) > 1:
            raise UserError(f"{name}:{list(values.values())[1]}: another {variable}; expected the dump of one job")
        for value, line in values.items():
            lists.setdefault(variable, names(value, f"{name}:{line}: {variable}="))
    for value, line in found.get("SLURM_NNODES", {}).items():
        counts = [len(it) for it in lists.values()]
        if counts and value not in map(str, counts):
            raise UserError(f"{name}:{line}: SLURM_NNODES={value[:20]}, but {counts[0]} nodes in the list")
    if lists:
        return next(iter(lists.values()))
    if single := found.get("SLURMD_NODENAME"):
        return tuple(single)
    raise UserError(f"{name}: no SLURM_JOB_NODELIST, SLURM_NODELIST or SLURMD_NODENAME; expected the dump of a job")


def _at(name: str, line: int, tasks: str) -> None:
    try:
        tasks_per_node(tasks)
    except UserError as error:
        raise UserError(f"{name}:{line}: {error}") from None


def _node_of(address: str, nodes: tuple[str, ...]) -> str | None:
    """The node that the address is of: the longest name that it ends in."""
    known = set(nodes)
    pieces = address.split(".")
    return next((end for at in range(len(pieces)) if (end := ".".join(pieces[at:])) in known), None)
