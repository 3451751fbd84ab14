"""Print a placement: the cost of every axis before and after, straddling groups, the order of nodes, and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hpc_train.cluster.hostlist import fold_names
from hpc_train.placement.fabric import Fabric, pluralise_level
from hpc_train.placement.mesh_groups import format_axes
from hpc_train.placement.node_locations import NodeLocations
from hpc_train.placement.placement_result import Placement
from hpc_train.terminal import one_line
from hpc_train.traffic.axes import Flow
from hpc_train.units import format_seconds, format_traffic

_MAX_ORDER_LENGTH = 240
"""Maximum number of characters of an order to print; the JSON has all of it."""


@dataclass(frozen=True)
class PlacementView:
    """One placement with its inputs, as `topology place` prints it."""

    locations: NodeLocations
    fabric: Fabric
    sizes: Mapping[str, int]
    flows: Sequence[Flow]
    placement: Placement
    notes: Sequence[str]
    advice: Sequence[str]

    def render(self) -> Iterator[RenderableType]:
        """Yield the parts to print, from top to bottom."""
        yield Text(self._format_headline(), style="bold")
        yield Text(one_line(f"{self.locations.source}; {self._format_levels()}"), style="dim")
        yield self._make_cost_table()
        if self.placement.straddling:
            yield self._make_straddling_table()
        yield Text(f"{self.placement.reason} (searched for {format_seconds(self.placement.seconds)})", style="green")
        if self.placement.nodes != tuple(range(len(self.fabric.nodes))):
            yield Text(
                f"order of nodes: {_cut_order(fold_names(self.fabric.nodes[node] for node in self.placement.nodes))}"
            )
        for line in self.advice:
            yield Text(f"advice: {line}", style="cyan")
        for note in self.notes:
            yield Text(one_line(f"note: {note}"), style="yellow")

    def _format_headline(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one rank"
        count, ranks = len(self.fabric.nodes), self.fabric.ranks_per_node
        return f"{mesh} on {count} node{'s' * (count != 1)} x {ranks} rank{'s' * (ranks != 1)}"

    def _format_levels(self) -> str:
        counts = [(len(level.uplink), level.name) for level in self.fabric.levels]
        return ", ".join(f"{count} {pluralise_level(name) if count != 1 else name}" for count, name in counts)

    def _make_cost_table(self) -> Table:
        before, after = self.placement.identity, self.placement.placed
        table = Table(title="communication of one step, modelled, without overlap", title_justify="left")
        table.add_column("axis")
        for name in ("bytes", "launcher's order", "placed"):
            table.add_column(name, justify="right")
        moved = self._sum_moved_bytes()
        for axis in sorted(before.per_axis, key=before.per_axis.__getitem__, reverse=True):
            columns = (
                format_traffic(moved.get(axis, 0.0)),
                format_seconds(before.per_axis[axis]),
                format_seconds(after.per_axis[axis]),
            )
            table.add_row(axis, *columns)
        table.add_section()
        table.add_row(
            "all", format_traffic(sum(moved.values())), format_seconds(before.total), format_seconds(after.total)
        )
        return table

    def _sum_moved_bytes(self) -> dict[str, float]:
        """Map each axis to the bytes of its collectives' buffers."""
        moved: dict[str, float] = {}
        for flow in self.flows:
            name = format_axes(flow.axes)
            moved[name] = moved.get(name, 0.0) + flow.bytes * flow.calls
        return moved

    def _make_straddling_table(self) -> Table:
        table = Table(title="groups that straddle a level which could hold them", title_justify="left")
        for name in ("axis", "level"):
            table.add_column(name)
        for name in ("groups", "launcher's order", "placed"):
            table.add_column(name, justify="right")
        for axis, levels in self.placement.straddling.items():
            for level, counts in levels.items():
                table.add_row(axis, level, *(str(counts[name]) for name in ("groups", "identity", "placed")))
        return table


def _cut_order(text: str) -> str:
    return text if len(text) <= _MAX_ORDER_LENGTH else f"{text[:_MAX_ORDER_LENGTH]}... (all of it with --json)"
