"""Read Slurm's environment variables: the nodes of a job, and a node's switches (SLURM_TOPOLOGY_ADDR).

slurmd tells the address to every step that runs on the node. A dump of the variables of a job is a topology file too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

from hpc_train.cluster.hostlist import expand_hostlist, name_switch_group
from hpc_train.cluster.readers.slurm.slurm_records import ListedUnit, build_cluster, expand_names
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_COORDINATES = {"ring": 1, "torus": 3}
"""Numbers that follow a unit's name after colons, by the first word of the pattern."""


def parse_address(address: str, pattern: str | None, node: str, switches: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names from the top switch to the leaf (or block, ring, torus) of `node`; () if Slurm knows none.

    address, pattern: SLURM_TOPOLOGY_ADDR and _PATTERN; node: SLURMD_NODENAME. Names of nodes and switches may hold
    dots, so the node is cut off by its name, and the number of names left is the pattern's. Where dots leave it open
    which names these are, `switches` (all names, as scontrol shows them) decides; without, all that is before the
    node is one name of its own: nodes with the same are together, and no more is claimed. A level without a switch is
    left out. Several switches on one level are one group, named alike whatever their order: opasw[06-07,11,14-15].

    Raises UserError for an address that does not end in the node's name.
    """
    if address == node:
        return ()
    before = address.removesuffix(f".{node}")
    if before == address:
        raise UserError(f"SLURM_TOPOLOGY_ADDR={address[:80]} does not end in the node's name, {node}")
    # The pattern has one word for each level, such as switch.switch.node. For rings and toruses the name is followed by
    # coordinates after colons, which are no part of it.
    words = (pattern or "").split(".")[:-1]
    if (first := words[0].split(":")[0] if words else "") in _COORDINATES:
        name = before.rsplit(":", _COORDINATES[first])[0]
        return (name,) if name else ()
    path = _split_address(before, len(words), switches)
    return (before,) if path is None else tuple(_normalise_name(name) for name in path if name)


def build_cluster_from_paths(paths: Mapping[str, Sequence[str]]) -> Cluster:
    """Build a cluster of nodes in this order, each with its switches from top to leaf; kind slurm_address.

    Raises UserError where the paths contradict each other (one puts a above b, another b above a).
    """
    nodes: dict[str, list[str]] = {}
    below: dict[str, dict[str, None]] = {}
    for node, names in paths.items():
        for name in names:
            nodes.setdefault(name, [])
            below.setdefault(name, {})
        for upper, lower in pairwise(names):
            below[upper][lower] = None
        if names:
            nodes[names[-1]].append(node)
    units = {name: ListedUnit(name, 1, tuple(nodes[name]), tuple(below[name])) for name in nodes}
    return build_cluster("slurm_address", units, "SLURM_TOPOLOGY_ADDR", paths)


def _split_address(before: str, count: int, switches: Collection[str]) -> tuple[str, ...] | None:
    """Split an address into `count` names if there is exactly one way; else None. Names may contain dots."""
    pieces = before.split(".")
    if len(pieces) == count:
        return tuple(pieces)
    if not switches or not 0 < count < len(pieces):
        return None
    known_names = frozenset(switches)

    @cache
    def list_splits(start: int, left: int) -> list[tuple[str, ...]]:
        """Return up to two ways to split the pieces from `start` on into `left` names."""
        if left == 0:
            return [()] if start == len(pieces) else []
        found: list[tuple[str, ...]] = []
        # Leave at least one piece for each name that follows. More than two ways are as ambiguous as two, so the number
        # of ways is cut there, which keeps the search short.
        for end in range(start + 1, len(pieces) - left + 2):
            name = ".".join(pieces[start:end])
            if not name or _is_known(name, known_names):
                found += [(name, *rest) for rest in list_splits(end, left - 1)]
        return found[:2]

    splits = list_splits(0, count)
    return splits[0] if len(splits) == 1 else None


def _is_known(name: str, known_names: Collection[str]) -> bool:
    return name in known_names or (_is_group(name) and all(member in known_names for member in _expand_group(name)))


def _normalise_name(name: str) -> str:
    return name_switch_group(_expand_group(name)) if _is_group(name) else name


def _is_group(name: str) -> bool:
    return "," in name or "[" in name


def _expand_group(name: str) -> list[str]:
    try:
        return expand_hostlist(name) or [name]
    except UserError:
        return [name]


MAX_NODES = 1 << 18
"""Nodes of a job."""

_NAME = r"[ \t]*(?:[0-9]+:[ \t]*)?(?:export[ \t]+|declare[ \t]+-x[ \t]+)?(SLURMD?_\w*)"
_LINE = re.compile(rf"{_NAME}(?:=(.*))?", re.DOTALL)
_FIRST = re.compile(rf"^{_NAME}=", re.MULTILINE)
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"


def matches_slurm_environment(text: str) -> bool:
    """Whether a line sets a variable of Slurm's."""
    return bool(_FIRST.search(text))


def read_slurm_environment(text: str, name: str) -> Cluster:
    """Read the job's nodes in Slurm's order; kind slurm_environment. Each SLURM_TOPOLOGY_ADDR adds its node's switches.

    Takes `NAME=value`, `export NAME=value`, `declare -x NAME="value"` and srun's labels, one node's or several one
    after the other. Raises UserError `FILE:LINE: ...` for a line cut short, two different lists of nodes, or a number
    of nodes that no list has.
    """
    variables: dict[str, dict[str, int]] = {}
    for line, variable, value in _read_variables(text, name):
        variables.setdefault(variable, {}).setdefault(value, line)
    nodes = _list_nodes(variables, name)
    for value, line in variables.get("SLURM_TASKS_PER_NODE", {}).items():
        _check_tasks_per_node(name, line, value)
    paths: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
    pattern = next(iter(variables.get(_PATTERN, {"": 0})))
    for address, line in variables.get("SLURM_TOPOLOGY_ADDR", {}).items():
        node = _find_node(address, nodes)
        if node is None:
            raise UserError(f"{name}:{line}: SLURM_TOPOLOGY_ADDR={address[:80]} ends in no node of the job")
        paths[node] = parse_address(address, pattern, node)
    shown = build_cluster_from_paths(paths)
    return Cluster("slurm_environment", shown.nodes, switches=shown.switches)


def parse_tasks_per_node(text: str) -> list[int]:
    """Parse SLURM_TASKS_PER_NODE, such as `34,26,2(x2)`, to one number a node. Raises UserError for another form."""
    tasks: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\s*", piece)
        if not match:
            raise UserError(f"SLURM_TASKS_PER_NODE={text[:60]}; expected tasks of each node, such as 34,26,2(x2)")
        times = int(match[2] or 1)
        if len(tasks) + times > MAX_NODES:
            raise UserError(f"SLURM_TASKS_PER_NODE={text[:60]}: more than {MAX_NODES} nodes")
        tasks += [int(match[1])] * times
    return tasks


def _read_variables(text: str, name: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        match = _LINE.fullmatch(line.rstrip("\r"))
        if not match:
            continue
        if match[2] is None:
            raise UserError(f"{name}:{number}: {line[:60]!r}; expected NAME=VALUE (is the text cut short?)")
        yield number, match[1], _unquote(match[2].strip())


def _unquote(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _list_nodes(variables: Mapping[str, Mapping[str, int]], name: str) -> tuple[str, ...]:
    lists: dict[str, tuple[str, ...]] = {}
    for variable in _LISTS:
        values = variables.get(variable, {})
        if variable != "SLURM_STEP_NODELIST" and len(values) > 1:
            raise UserError(f"{name}:{list(values.values())[1]}: another {variable}; expected the dump of one job")
        for value, line in values.items():
            lists.setdefault(variable, expand_names(value, f"{name}:{line}: {variable}="))
    for value, line in variables.get("SLURM_NNODES", {}).items():
        counts = [len(names) for names in lists.values()]
        if counts and value not in map(str, counts):
            raise UserError(f"{name}:{line}: SLURM_NNODES={value[:20]}, but {counts[0]} nodes in the list")
    # The job's own list comes first in _LISTS; a step may run on fewer nodes.
    if lists:
        return next(iter(lists.values()))
    if single := variables.get("SLURMD_NODENAME"):
        return tuple(single)
    raise UserError(f"{name}: no SLURM_JOB_NODELIST, SLURM_NODELIST or SLURMD_NODENAME; expected the dump of a job")


def _check_tasks_per_node(name: str, line: int, tasks: str) -> None:
    try:
        parse_tasks_per_node(tasks)
    except UserError as error:
        raise UserError(f"{name}:{line}: {error}") from None


def _find_node(address: str, nodes: tuple[str, ...]) -> str | None:
    """Return the node of an address: the longest name that the address ends in."""
    node_names = set(nodes)
    pieces = address.split(".")
    return next((end for index in range(len(pieces)) if (end := ".".join(pieces[index:])) in node_names), None)
