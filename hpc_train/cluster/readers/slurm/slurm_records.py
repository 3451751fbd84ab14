"""Parse Slurm's lines of `Key=Value`, and build a Cluster from the switches that a text lists.

Contradictions (a circle, a node on two leaves, a switch that no line defines) are refused. Levels are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.cluster.spec import Cluster, Node, Switch
from hpc_train.errors import UserError

_PAIR = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*=\s*(?:\"([^\"]*)\"(?!\S)|([^\s\"]+))")
# People paste the command with its output.
_PROMPT = re.compile(r"[^=]*\bscontrol\s[^=]*\bshow\s+topo[^=]*")


@dataclass(frozen=True)
class KeyValueRecord:
    """One line; keys are lower case, as Slurm ignores their case."""

    file: str
    line: int
    first: str
    """First key of the line."""
    values: dict[str, str]

    def name(self) -> str:
        """Return the single name that the first key gives."""
        return check_single_name(self.values[self.first], f"{self.file}:{self.line}: {self.first}=")

    def list(self, key: str) -> tuple[str, ...]:
        """Return the names of a host list, each once; () if the key is absent."""
        text = self.values.get(key, "")
        return () if text == "(null)" else expand_names(text, f"{self.file}:{self.line}: {key}=")

    def number(self, key: str) -> int:
        """Return a count. Raises UserError if it is absent or no number."""
        text = self.values.get(key)
        if text is None or not re.fullmatch("[0-9]{1,9}", text):
            raise self.error(f"{key}={text or ''}; expected {key}=NUMBER (is the line cut short?)")
        return int(text)

    def error(self, what: str) -> UserError:
        return UserError(f"{self.file}:{self.line}: {what}")


@dataclass(frozen=True)
class RecordGrammar:
    """The keys that the lines of one format may hold, in lower case."""

    kinds: Mapping[str, str]
    """Kind of cluster by first key of a line; all lines of a text are of one kind."""
    keys: Mapping[str, frozenset[str]]
    """Keys that lines may have, by kind."""


def parse_records(text: str, file: str, grammar: RecordGrammar) -> Iterator[KeyValueRecord]:
    """Parse every line that is not empty, a comment or a shell's prompt; a backslash at the end continues a line.

    Raises UserError `file:line: ...` for a line of another form and for a key that the grammar has not.
    """
    kind: str | None = None
    for number, line in _join_lines(text):
        if _PROMPT.fullmatch(line):
            continue
        pairs = _split_pairs(line)
        if pairs is None:
            raise UserError(f"{file}:{number}: {line.strip()[:60]!r}; expected KEY=VALUE KEY=VALUE ...")
        record = KeyValueRecord(file, number, pairs[0][0], dict(pairs))
        if record.first not in grammar.kinds:
            raise record.error(f"begins with {record.first}=; expected {_format_keys(grammar.kinds)}")
        kind = kind or grammar.kinds[record.first]
        if strange := next((key for key in record.values if key not in grammar.keys[kind]), None):
            raise record.error(f"{strange}= in a {kind}; expected {_format_keys(grammar.keys[kind])}")
        # A dictionary has dropped the repeated key by now, so the lengths tell.
        if len(record.values) < len(pairs):
            raise record.error("a key stands there twice")
        yield record


def _format_keys(keys: Iterable[str]) -> str:
    return ", ".join(f"{key}=" for key in sorted(keys))


def expand_names(text: str, where: str) -> tuple[str, ...]:
    """Expand a host list, each name once, in order. where: prefix of the error message."""
    try:
        return tuple(dict.fromkeys(expand_hostlist(text)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def check_single_name(text: str, where: str) -> str:
    """Return the name if it is a single one: no brackets, no list."""
    names = expand_names(text, where)
    if names != (text,):
        raise UserError(f"{where}{text[:60]}; expected one name")
    return text


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (first line number, text without comment) of each logical line that is not empty."""
    pending, start = "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        # As in slurm.conf: # begins a comment, and no value of these lines can hold one.
        line = raw.split("#", 1)[0].rstrip()
        start = start or number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        if (pending + line).strip():
            yield start, pending + line
        pending, start = "", 0
    if pending.strip():
        yield start, pending


def _split_pairs(line: str) -> list[tuple[str, str]] | None:
    pairs, at = [], 0
    line = line.rstrip()
    while at < len(line):
        match = _PAIR.match(line, at)
        if not match:
            return None
        pairs.append((match[1].lower(), match[2] if match[3] is None else match[3]))
        at = match.end()
    return pairs


MAX_NAMES = 1 << 20
"""Maximum number of names in all lists of a text; more than any real cluster has."""


_INSIDE_UNUSED = (
    "which nodes of a ring or torus are neighbours is not used: each counts as one switch that all its nodes hang on"
)


@dataclass(frozen=True)
class ListedUnit:
    """One switch, block or ring as a text lists it."""

    name: str
    line: int
    nodes: tuple[str, ...] = ()
    """Nodes that are directly on it; as scontrol lists it, all nodes below it."""
    switches: tuple[str, ...] = ()
    level: int = 0
    """Level that the text states; used only if a switch below is not in the text."""
    link_speed: int | None = None
    """LinkSpeed=; None if not given, or if it is Slurm's default of 1."""


def collect_units(units: Iterable[ListedUnit], file: str) -> dict[str, ListedUnit]:
    """Map names to units, in order. Raises UserError for a repeated name, or for more names than any machine has."""
    by_name: dict[str, ListedUnit] = {}
    size = 0
    for unit in units:
        if unit.name in by_name:
            raise UserError(f"{file}:{unit.line}: {unit.name} is defined in line {by_name[unit.name].line} already")
        by_name[unit.name] = unit
        size += len(unit.nodes) + len(unit.switches)
        if size > MAX_NAMES:
            raise UserError(f"{file}:{unit.line}: more than {MAX_NAMES} names; not a real machine")
    return by_name


def build_cluster(kind: str, units: Mapping[str, ListedUnit], file: str, nodes: Iterable[str] = ()) -> Cluster:
    """Build the cluster of these units, in their order; `nodes` come before those that the units name.

    A switch below may lack a unit of its own: it is named by the one above and nothing else is known of it.
    Raises UserError, with the line, where switches hang on each other in a circle.
    """
    levels = _compute_levels(units, file)
    everything = dict.fromkeys([*nodes, *(node for unit in units.values() for node in unit.nodes)])
    switches = tuple(
        Switch(unit.name, levels[unit.name], unit.nodes, unit.switches, link_speed=unit.link_speed)
        for unit in units.values()
    )
    notes = (_INSIDE_UNUSED,) if kind in ("slurm_ring", "slurm_torus3d") else ()
    return Cluster(kind, tuple(Node(name) for name in everything), switches=switches, notes=notes)


def check_defined(units: Mapping[str, ListedUnit], file: str) -> None:
    """Raise UserError for a switch below another that no line defines."""
    for unit in units.values():
        missing = next((child for child in unit.switches if child not in units), None)
        if missing is not None:
            raise UserError(f"{file}:{unit.line}: {unit.name} has switch {missing}, which no line defines")


def check_disjoint(units: Mapping[str, ListedUnit], file: str) -> None:
    """Raise UserError for a node on two units."""
    holder: dict[str, ListedUnit] = {}
    for unit in units.values():
        for node in unit.nodes:
            before = holder.setdefault(node, unit)
            if before is not unit:
                where = f"{before.name} (line {before.line})"
                raise UserError(
                    f"{file}:{unit.line}: node {node} is in {unit.name} and in {where}; expected one of them"
                )


def sort_bottom_up(units: Mapping[str, ListedUnit], file: str) -> list[str]:
    """Sort all names, including those without a unit, each after everything below it. Raises UserError for a cycle."""
    try:
        return list(TopologicalSorter({unit.name: unit.switches for unit in units.values()}).static_order())
    except CycleError as error:
        circle = error.args[1]
        line = min(units[name].line for name in circle)
        raise UserError(f"{file}:{line}: {' below '.join(circle[:5])}: switches in a circle; expected a tree") from None


def parse_link_speed(number: int) -> int | None:
    """Convert LinkSpeed= to Switch.link_speed; None for 1, which Slurm prints if it is not set."""
    return number if number > 1 else None


def _compute_levels(units: Mapping[str, ListedUnit], file: str) -> dict[str, int]:
    levels: dict[str, int] = {}
    for name in sort_bottom_up(units, file):
        unit = units.get(name)
        if unit is None:
            continue
        below = [levels.get(child) for child in unit.switches]
        counted = max((1 + (level or 0) for level in below), default=0)
        # A child that no line describes may be a whole tree: then the level that scontrol printed is the better guess.
        levels[name] = max(counted, unit.level) if None in below else counted
    return levels
