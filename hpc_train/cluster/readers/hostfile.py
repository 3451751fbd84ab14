"""Read files that name hosts: one host list as Slurm writes it, or a name per line as MPI launchers take it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_train.cluster.hostlist import MAX_HOSTS, expand_hostlist
from hpc_train.cluster.spec import Cluster, Node
from hpc_train.errors import UserError

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_LIST = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.,\[\]{}\- \t]*")
_ENTRY = re.compile(
    rf"({_NAME}(?:\[[0-9,-]+\][A-Za-z0-9_.-]*)*)(?::[0-9]+)?(?:[ \t]+[A-Za-z_-]+[ \t]*=[ \t]*\S+)*[ \t]*"
)


def matches_hostlist(text: str) -> bool:
    """Whether the text is one line with brackets or commas, of characters that names can have."""
    lines = [line for _, line in _iterate_lines(text)]
    return len(lines) == 1 and bool(_LIST.fullmatch(lines[0])) and any(character in lines[0] for character in "[]{},")


def read_hostlist(text: str, name: str) -> Cluster:
    """Read the nodes of one host list in Slurm's order, duplicates kept; kind hostlist.

    Raises UserError as `expand_hostlist` does.
    """
    nodes: list[str] = []
    for number, line in _iterate_lines(text):
        nodes += _expand_line(line, name, number)
    if not nodes:
        raise UserError(f"{name}: no name in it; expected a host list such as n[001-016]")
    return Cluster("hostlist", tuple(Node(host) for host in nodes))


def matches_hostfile(text: str) -> bool:
    """Whether the first line names a host, and most others do."""
    lines = [line for _, line in _iterate_lines(text)]
    named = sum(1 for line in lines if _ENTRY.fullmatch(line))
    return (
        bool(lines) and bool(_ENTRY.fullmatch(lines[0])) and 4 * named >= 3 * len(lines) and not matches_hostlist(text)
    )


def read_hostfile(text: str, name: str) -> Cluster:
    """Read the nodes of a host file in its order, duplicates kept (a line a slot); kind hostfile.

    Takes comments, `slots=8` and other KEY=VALUE, `host:8`, and a host list for a name. Raises UserError
    `FILE:LINE: ...` for any other line.
    """
    nodes: list[str] = []
    for number, line in _iterate_lines(text):
        match = _ENTRY.fullmatch(line)
        if not match:
            raise UserError(f"{name}:{number}: {line[:60]!r}; expected HOST or HOST slots=N")
        nodes += _expand_line(match[1], name, number)
        if len(nodes) > MAX_HOSTS:
            raise UserError(f"{name}:{number}: more than {MAX_HOSTS} hosts")
    if not nodes:
        raise UserError(f"{name}: no host in it; expected a name a line")
    return Cluster("hostfile", tuple(Node(host) for host in nodes))


def _expand_line(text: str, name: str, number: int) -> list[str]:
    try:
        return expand_hostlist(text)
    except UserError as error:
        raise UserError(f"{name}:{number}: {error}") from None


def _iterate_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.split("\n"), 1):
        if line := raw.split("#", 1)[0].strip():
            yield number, line
