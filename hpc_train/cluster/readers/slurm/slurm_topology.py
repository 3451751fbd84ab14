"""Read Slurm's topology: topology.conf, and the output of `scontrol show topology`; tree, block, ring and torus3d.

Both have lines of `Key=Value`. scontrol lists under a switch the nodes of the switches below it too, topology.conf only
its own. Slurm itself is asked once, by one process of a job, never by every rank.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hpc_train.cluster.readers.slurm.slurm_records import (
    KeyValueRecord,
    ListedUnit,
    RecordGrammar,
    build_cluster,
    check_defined,
    check_disjoint,
    collect_units,
    parse_link_speed,
    parse_records,
    sort_bottom_up,
)
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_SCONTROL_GRAMMAR = RecordGrammar(
    kinds={
        "switchname": "slurm_tree",
        "blockname": "slurm_block",
        "aggregatedblock": "slurm_block",
        "ringname": "slurm_ring",
        "torusname": "slurm_torus3d",
    },
    keys={
        "slurm_tree": frozenset({"switchname", "level", "linkspeed", "nodes", "switches"}),
        "slurm_block": frozenset({"blockname", "aggregatedblock", "blockindex", "nodes", "blocksize"}),
        "slurm_ring": frozenset({"ringname", "nodes", "ringsize"}),
        "slurm_torus3d": frozenset({"torusname", "dims", "nodes", "placementdims", "anchors"}),
    },
)
_SHOWN = re.compile(
    r"^[ \t]*(?:AggregatedBlock=|TorusName=|SwitchName=\S+[ \t]+Level=|BlockName=\S+[ \t]+BlockIndex=|"
    r"(?:BlockName|RingName)=\S+[ \t][^#\n]*\b(?:BlockSize|RingSize)=)",
    re.MULTILINE,
)


def matches_scontrol(text: str) -> bool:
    """Whether a line is as scontrol prints one (and not as topology.conf has it)."""
    return bool(_SHOWN.search(text))


def read_scontrol(text: str, name: str) -> Cluster:
    """Read the cluster; kind slurm_tree, slurm_block, slurm_ring or slurm_torus3d.

    scontrol repeats under Nodes= of a switch everything below it: here nodes stand where they hang. In an excerpt,
    where a switch below has no line of its own, the nodes that nobody else claims hang on the switch above.
    An AggregatedBlock is a switch whose switches are the largest blocks it is made of.

    Raises UserError `FILE:LINE: ...` for a line cut short, lists that contradict each other, and everything that
    topology.conf may not have either.
    """
    lines = list(parse_records(text, name, _SCONTROL_GRAMMAR))
    listed = collect_units((unit for unit in map(_read_scontrol_unit, lines) if unit is not None), name)
    if not listed:
        raise UserError(f"{name}: no switch or block; expected what `scontrol show topology` prints")
    kind = _SCONTROL_GRAMMAR.kinds[lines[0].first]
    nodes = [node for unit in listed.values() for node in unit.nodes]
    if kind == "slurm_block":
        _check_sizes(lines)
        listed = {unit.name: unit for unit in _nest_blocks(listed)}
    direct = _keep_direct_nodes(listed, name)
    if kind != "slurm_tree":
        check_disjoint(direct, name)
    return build_cluster(kind, direct, name, nodes)


def _check_sizes(lines: Sequence[KeyValueRecord]) -> None:
    """Refuse sizes on only some lines: Slurm ends every line of a block with its size, or (before 24.05) none."""
    if any("blocksize" in line.values for line in lines):
        for line in lines:
            line.number("blocksize")


def _read_scontrol_unit(record: KeyValueRecord) -> ListedUnit | None:
    nodes = record.list("nodes")
    if record.first == "switchname":
        return _make_switch(record, nodes)
    if record.first == "torusname":
        return _make_torus(record, nodes)
    if record.first == "ringname":
        if record.number("ringsize") != len(nodes):
            raise record.error(f"RingSize={record.values['ringsize']} but {len(nodes)} nodes")
        return ListedUnit(record.name(), record.line, nodes)
    return _make_block(record, nodes)


def _make_block(record: KeyValueRecord, nodes: tuple[str, ...]) -> ListedUnit:
    for key in {"blockindex", "blocksize"} & record.values.keys():
        record.number(key)
    name, blocks = record.values[record.first], record.list(record.first)
    if blocks == (name,):
        return ListedUnit(name, record.line, nodes)
    return ListedUnit(name, record.line, nodes, blocks)


def _make_switch(record: KeyValueRecord, nodes: tuple[str, ...]) -> ListedUnit:
    level, switches = record.number("level"), record.list("switches")
    speed = parse_link_speed(record.number("linkspeed"))
    if bool(level) != bool(switches):
        raise record.error(f"Level={level} {'without' if level else 'and'} Switches= (is the line cut short?)")
    return ListedUnit(record.name(), record.line, nodes, switches, level, speed)


def _make_torus(record: KeyValueRecord, nodes: tuple[str, ...]) -> ListedUnit | None:
    if "placementdims" in record.values:  # a line on how Slurm allocates within the torus, not a torus of its own
        return None
    if not re.fullmatch("[0-9]{1,5}x[0-9]{1,5}x[0-9]{1,5}", record.values.get("dims", "")):
        raise record.error("expected TorusName=NAME Dims=XxYxZ Nodes=...")
    return ListedUnit(record.name(), record.line, nodes)


def _nest_blocks(listed: Mapping[str, ListedUnit]) -> Iterator[ListedUnit]:
    """Give aggregated blocks the largest blocks that they consist of, instead of all base blocks."""
    made_of = {unit.name: frozenset(unit.switches or (unit.name,)) for unit in listed.values()}
    largest_first = sorted(made_of, key=lambda name: -len(made_of[name]))
    for unit in listed.values():
        inside = (name for name in largest_first if made_of[name] < made_of[unit.name])
        yield replace(unit, switches=_cover_blocks(unit.switches, inside, made_of)) if unit.switches else unit


def _cover_blocks(
    blocks: Sequence[str], inside: Iterable[str], made_of: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """Return the fewest names that cover `blocks`, in their order.

    The largest of those `inside` come first, then those that no line shows.
    """
    chosen = {block: block for block in blocks}
    covered: set[str] = set()
    for name in inside:
        if covered.isdisjoint(made_of[name]):
            covered |= made_of[name]
            chosen.update(dict.fromkeys(made_of[name], name))
    return tuple(dict.fromkeys(chosen.values()))


def _keep_direct_nodes(listed: Mapping[str, ListedUnit], file: str) -> dict[str, ListedUnit]:
    """Reduce each unit to the nodes that are directly on it."""
    below: dict[str, set[str]] = {}
    listed_fully: dict[str, bool] = {}
    direct = {}
    for name in sort_bottom_up(listed, file):
        unit = listed.get(name)
        under: set[str] = set().union(*(below[child] for child in unit.switches)) if unit else set()
        listed_fully[name] = unit is not None and all(listed_fully[child] for child in unit.switches)
        if unit is not None:
            direct[name] = _remove_nodes(unit, under, listed_fully[name], file)
        below[name] = under.union(unit.nodes if unit else ())
    return {name: direct[name] for name in listed}


def _remove_nodes(unit: ListedUnit, under: set[str], listed_fully: bool, file: str) -> ListedUnit:
    """Return the unit without the nodes under its switches. listed_fully: the text lists all of these switches."""
    if not unit.switches or not unit.nodes:
        return unit
    members = set(unit.nodes)
    strange = next((node for node in under if node not in members), None)
    if strange is not None:
        raise UserError(f"{file}:{unit.line}: Nodes= of {unit.name} lacks node {strange}, which hangs below it")
    rest = tuple(node for node in unit.nodes if node not in under)
    if rest and listed_fully:
        what = f"{unit.name} lists node {rest[0]}, which nothing below it has"
        raise UserError(f"{file}:{unit.line}: {what} (is the text cut short?)")
    return replace(unit, nodes=rest)


SCONTROL_COMMAND = ("scontrol", "show", "topology")
SCONTROL_TIMEOUT = 10.0


def query_topology(command: Sequence[str] = SCONTROL_COMMAND, timeout: float = SCONTROL_TIMEOUT) -> Cluster | None:
    """Ask scontrol for the topology, once; for one process of a job, never for every rank.

    None where Slurm has no topology (topology/flat prints nothing), does not answer within `timeout` seconds, or is
    not there. Raises UserError for an answer that cannot be understood.
    """
    # SLURM_TOPO_LEN makes scontrol cut its lines.
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_TOPO_LEN"}
    try:
        answer = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout.decode("utf-8", "replace")
    if answer.returncode or not matches_scontrol(text):
        return None
    return read_scontrol(text, " ".join(command))


_CONF_FIRST_LINE = re.compile(
    r"^[ \t]*(?:SwitchName|BlockName|RingName|BlockSizes)[ \t]*=", re.IGNORECASE | re.MULTILINE
)
_CONF_GRAMMAR = RecordGrammar(
    kinds={
        "switchname": "slurm_tree",
        "blockname": "slurm_block",
        "blocksizes": "slurm_block",
        "ringname": "slurm_ring",
    },
    keys={
        "slurm_tree": frozenset({"switchname", "switches", "nodes", "linkspeed"}),
        "slurm_block": frozenset({"blockname", "nodes", "blocksizes"}),
        "slurm_ring": frozenset({"ringname", "nodes"}),
    },
)


def matches_topology_conf(text: str) -> bool:
    """Whether a line begins as one of topology.conf does, and none as scontrol prints it."""
    return bool(_CONF_FIRST_LINE.search(text)) and not matches_scontrol(text)


def read_topology_conf(text: str, name: str) -> Cluster:
    """Read the cluster; kind slurm_tree, slurm_block or slurm_ring. Keys in any case, comments, continued lines.

    As Slurm does, refuses a switch with both nodes and switches, one below another that no line defines, a name that
    is defined twice and a circle. Several roots are legal, and so is a node (or switch) on several switches. A node in
    two blocks or rings is refused. BlockSizes= says how Slurm plans, not what hangs where: no switch comes of it.
    """
    lines = list(parse_records(text, name, _CONF_GRAMMAR))
    units = collect_units((_read_conf_unit(line) for line in lines if line.first != "blocksizes"), name)
    if not units:
        raise UserError(f"{name}: no switch or block; expected lines such as SwitchName=leaf1 Nodes=n[1-16]")
    check_defined(units, name)
    kind = _CONF_GRAMMAR.kinds[lines[0].first]
    if kind != "slurm_tree":
        check_disjoint(units, name)
    return build_cluster(kind, units, name)


def _read_conf_unit(record: KeyValueRecord) -> ListedUnit:
    nodes, switches = record.list("nodes"), record.list("switches")
    if nodes and switches:
        raise record.error("Nodes= and Switches= in one line; expected one of them")
    speed = parse_link_speed(record.number("linkspeed")) if "linkspeed" in record.values else None
    if "blocksizes" in record.values:
        raise record.error("BlockSizes= belongs on a line of its own")
    return ListedUnit(record.name(), record.line, nodes, switches, link_speed=speed)
