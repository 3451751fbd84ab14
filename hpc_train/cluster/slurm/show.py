"""What `scontrol show topology` prints: tree, block, ring and torus3d."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hpc_train.cluster.slurm.assemble import Unit, bottom_up, cluster, demand_disjoint, gather, link_speed
from hpc_train.cluster.slurm.records import Grammar, Record, records
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_GRAMMAR = Grammar(
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


def matches(text: str) -> bool:
    """Whether a line is as scontrol prints one (and not as topology.conf has it)."""
    return bool(_SHOWN.search(text))


def read(text: str, name: str) -> Cluster:
    """The cluster; kind slurm_tree, slurm_block, slurm_ring or slurm_torus3d.

    scontrol repeats under Nodes= of a switch everything below it: here nodes stand where they hang. In an excerpt,
    where a switch below has no line of its own, the nodes that nobody else claims hang on the switch above.
    An AggregatedBlock is a switch whose switches are the largest blocks it is made of.

    Raises UserError `FILE:LINE: ...` for a line cut short, lists that contradict each other, and everything that
    topology.conf may not have either.
    """
    lines = list(records(text, name, _GRAMMAR))
    listed = gather((it for it in map(_unit, lines) if it is not None), name)
    if not listed:
        raise UserError(f"{name}: no switch or block; expected what `scontrol show topology` prints")
    kind = _GRAMMAR.kinds[lines[0].first]
    nodes = [node for unit in listed.values() for node in unit.nodes]
    if kind == "slurm_block":
        _demand_sizes(lines)
        listed = {unit.name: unit for unit in _nested_blocks(listed)}
    direct = _direct(listed, name)
    if kind != "slurm_tree":
        demand_disjoint(direct, name)
    return cluster(kind, direct, name, nodes)


def _demand_sizes(lines: Sequence[Record]) -> None:
    """Slurm ends every line of a block with its size, or (before 24.05) none."""
    if any("blocksize" in it.values for it in lines):
        for it in lines:
            it.number("blocksize")


def _unit(record: Record) -> Unit | None:
    nodes = record.list("nodes")
    if record.first == "switchname":
        return _switch(record, nodes)
    if record.first == "torusname":
        return _torus(record, nodes)
    if record.first == "ringname":
        if record.number("ringsize") != len(nodes):
            raise record.error(f"RingSize={record.values['ringsize']} but {len(nodes)} nodes")
        return Unit(record.name(), record.line, nodes)
    return _block(record, nodes)


def _block(record: Record, nodes: tuple[str, ...]) -> Unit:
    for key in {"blockindex", "blocksize"} & record.values.keys():
        record.number(key)
    name, blocks = record.values[record.first], record.list(record.first)
    if blocks == (name,):
        return Unit(name, record.line, nodes)
    return Unit(name, record.line, nodes, blocks)


def _switch(record: Record, nodes: tuple[str, ...]) -> Unit:
    level, switches = record.number("level"), record.list("switches")
    speed = link_speed(record.number("linkspeed"))
    if bool(level) != bool(switches):
        raise record.error(f"Level={level} {'without' if level else 'and'} Switches= (is the line cut short?)")
    return Unit(record.name(), record.line, nodes, switches, level, speed)


def _torus(record: Record, nodes: tuple[str, ...]) -> Unit | None:
    if "placementdims" in record.values:
        return None
    if not re.fullmatch("[0-9]{1,5}x[0-9]{1,5}x[0-9]{1,5}", record.values.get("dims", "")):
        raise record.error("expected TorusName=NAME Dims=XxYxZ Nodes=...")
    return Unit(record.name(), record.line, nodes)


def _nested_blocks(listed: Mapping[str, Unit]) -> Iterator[Unit]:
    """Aggregated blocks with the largest blocks that they are made of, instead of all base blocks."""
    made_of = {unit.name: frozenset(unit.switches or (unit.name,)) for unit in listed.values()}
    largest_first = sorted(made_of, key=lambda name: -len(made_of[name]))
    for unit in listed.values():
        inside = (name for name in largest_first if made_of[name] < made_of[unit.name])
        yield replace(unit, switches=_largest(unit.switches, inside, made_of)) if unit.switches else unit


def _largest(blocks: Sequence[str], inside: Iterable[str], made_of: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """As few names as say all `blocks`, in their order: of what is `inside`, largest first, and what no line shows."""
    chosen = {block: block for block in blocks}
    taken: set[str] = set()
    for name in inside:
        if taken.isdisjoint(made_of[name]):
            taken |= made_of[name]
            chosen.update(dict.fromkeys(made_of[name], name))
    return tuple(dict.fromkeys(chosen.values()))


def _direct(listed: Mapping[str, Unit], file: str) -> dict[str, Unit]:
    """Each unit with only those nodes that hang on it directly."""
    below: dict[str, set[str]] = {}
    whole: dict[str, bool] = {}
    direct = {}
    for name in bottom_up(listed, file):
        unit = listed.get(name)
        under: set[str] = set().union(*(below[child] for child in unit.switches)) if unit else set()
        whole[name] = unit is not None and all(whole[child] for child in unit.switches)
        if unit is not None:
            direct[name] = _without(unit, under, whole[name], file)
        below[name] = under.union(unit.nodes if unit else ())
    return {name: direct[name] for name in listed}


def _without(unit: Unit, under: set[str], whole: bool, file: str) -> Unit:
    """The unit without the nodes under its switches; `whole`: all of these are in the text."""
    if not unit.switches or not unit.nodes:
        return unit
    own = set(unit.nodes)
    strange = next((node for node in under if node not in own), None)
    if strange is not None:
        raise UserError(f"{file}:{unit.line}: Nodes= of {unit.name} lacks node {strange}, which hangs below it")
    rest = tuple(node for node in unit.nodes if node not in under)
    if rest and whole:
        what = f"{unit.name} lists node {rest[0]}, which nothing below it has"
        raise UserError(f"{file}:{unit.line}: {what} (is the text cut short?)")
    return replace(unit, nodes=rest)
