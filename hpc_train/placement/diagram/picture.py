"""Draw pictures: one panel of a machine, or two of a run's ranks, in the launcher's order and in the placed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.switch_tree import find_paths
from hpc_train.errors import UserError
from hpc_train.placement.cost.cost_model import CostModel
from hpc_train.placement.diagram.canvas import FAINT_COLOUR, Canvas, choose_load_colour, measure_text
from hpc_train.placement.diagram.column_layout import COLUMN_LAYOUT
from hpc_train.placement.diagram.panel import Panel, draws_each_node, select_drawn_levels
from hpc_train.placement.diagram.row_layout import ROW_LAYOUT
from hpc_train.placement.fabric import NamedLevel, build_levels
from hpc_train.placement.mesh_groups import list_groups
from hpc_train.placement.placement_result import Placement
from hpc_train.traffic.axes import Flow
from hpc_train.units import format_seconds


@dataclass(frozen=True)
class PlacementPanels:
    """Makes the panels of a run before and after placement."""

    model: CostModel
    sizes: Mapping[str, int]
    """Degrees by mesh axis."""
    levels: tuple[NamedLevel, ...]
    axes: tuple[str, ...]
    """Axes whose groups colour the GPUs."""

    def make_panels(self, placement: Placement) -> list[Panel]:
        """Return both panels; one if the placement changes nothing."""
        identity = tuple(range(len(self.model.fabric.nodes)))
        before = self._make_panel("before", "launcher's order", identity, placement.identity.total)
        if placement.nodes == identity:
            return [before]
        return [before, self._make_panel("after", "placed", placement.nodes, placement.placed.total)]

    def _make_panel(self, key: str, title: str, order: Sequence[int], total: float) -> Panel:
        """Make one panel. order[i]: node that holds ranks i * ranks_per_node and following."""
        fabric = self.model.fabric
        colour, place = self._locate_ranks()
        place_of = np.full(len(fabric.nodes), 0, np.int64)
        place_of[np.asarray(order)] = np.arange(len(order))
        moved = self.model.compute_link_bytes(order)
        return Panel(
            key=key,
            title=f"{title}: {format_seconds(total)} of communication a step",
            levels=self.levels,
            gpus=fabric.ranks_per_node,
            colour=colour[place_of],
            place=place[place_of],
            first_rank=place_of * fabric.ranks_per_node,
            load={level.name: moved[level.name] / level.uplink for level in fabric.levels},
        )

    def _locate_ranks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (group, place in it) of every rank, [nodes, ranks per node], nodes in the order of ranks."""
        members = list_groups(self.sizes, self.axes)
        group, place = np.empty(members.size, np.int64), np.empty(members.size, np.int64)
        group[members] = np.arange(len(members))[:, None]
        place[members] = np.arange(members.shape[1])
        shape = (-1, self.model.fabric.ranks_per_node)
        return group.reshape(shape), place.reshape(shape)


def choose_axes(
    requested: str | None, sizes: Mapping[str, int], flows: Sequence[Flow], placement: Placement
) -> tuple[str, ...]:
    """Choose the axes to colour by: those of --axis, such as tp or dp_shard+cp; else those that gain or move most.

    Raises UserError for an unknown axis, or one of a single rank.
    """
    if requested is not None:
        return _parse_axes(requested, sizes)
    before, after = placement.identity.per_axis, placement.placed.per_axis
    gained = {axis: before[axis] - after[axis] for axis in before}
    moved: dict[str, float] = {}
    for flow in flows:
        name = "+".join(flow.axes)
        moved[name] = moved.get(name, 0.0) + flow.bytes * flow.calls
    large = {axis for axis, size in sizes.items() if size > 1}
    several = [axis for axis in before if _split_axes(axis, sizes)]
    # A group of all ranks has one colour.
    candidates = [axis for axis in several if not large <= set(axis.split("+"))] or several
    if not candidates:
        return ("dp_replicate",)
    best = max(candidates, key=lambda axis: (gained[axis] if gained[axis] > 0 else 0.0, moved.get(axis, 0.0)))
    return tuple(best.split("+"))


def _parse_axes(requested: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    axes = tuple(requested.split("+"))
    large = [axis for axis, size in sizes.items() if size > 1]
    if unknown := [axis for axis in axes if axis not in sizes]:
        raise UserError(f"--axis {requested}: {unknown[0]!r} is not a mesh axis; choose from {', '.join(sizes)}")
    if not _split_axes(requested, sizes):
        raise UserError(f"--axis {requested}: has one rank in this mesh; choose from {', '.join(large) or 'none'}")
    return axes


def _split_axes(label: str, sizes: Mapping[str, int]) -> bool:
    return any(sizes.get(axis, 1) > 1 for axis in label.split("+"))


_MARGIN, _BETWEEN, _WIDEST = 18.0, 36.0, 1500.0
_CAPTION, _LINE_HEIGHT = 8.0, 14.0


def draw_cluster(cluster: Cluster, path: Path) -> None:
    """Draw a cluster's switches, nodes and GPUs. Raises UserError if there is no node, and as `draw_panels` does."""
    paths = {node: path for node, path in find_paths(cluster).items() if path}
    names = list(dict.fromkeys([*(node.name for node in cluster.nodes), *paths]))
    if not names:
        raise UserError(f"--picture {path}: there is no node to draw")
    domains = {node.name: clique for node in cluster.nodes for gpu in node.gpus if (clique := gpu.clique) is not None}
    gpus = max((len(node.gpus) for node in cluster.nodes), default=0)
    levels = build_levels(names, paths, domains)
    title = f"{cluster.kind}: {len(names)} node{'s' * (len(names) != 1)}{f' x {gpus} GPUs' if gpus else ''}"
    draw_panels([Panel("here", title, levels, gpus)], None, path)


def draw_panels(panels: Sequence[Panel], axes: str | None, path: Path) -> None:
    """Draw panels side by side, or one above the other if that is too wide, with a legend below.

    axes: those whose groups colour the GPUs. Raises UserError, one line, where the file cannot be written.
    """
    layouts = [COLUMN_LAYOUT if draws_each_node(panel, select_drawn_levels(panel)) else ROW_LAYOUT for panel in panels]
    sizes = [layout.measure(panel) for layout, panel in zip(layouts, panels, strict=True)]
    heaviest = max(panel.heaviest for panel in panels)
    in_a_row = sum(width for width, _ in sizes) + _BETWEEN * (len(sizes) - 1) <= _WIDEST
    corners = _place_panels(sizes, in_a_row)
    numbers = all(layout.has_rank_numbers(panel) for layout, panel in zip(layouts, panels, strict=True))
    caption = _write_caption(axes, numbers)
    width = max(x + size[0] for (x, _), size in zip(corners, sizes, strict=True)) + _MARGIN
    width = max(width, *(measure_text(line, _CAPTION) + 2 * _MARGIN for line in caption), 340.0)
    below = max(y + size[1] for (_, y), size in zip(corners, sizes, strict=True)) + 12
    canvas = Canvas(width, below + _LINE_HEIGHT * (len(caption) + (1 if heaviest else 0)) + _MARGIN)
    for layout, panel, corner in zip(layouts, panels, corners, strict=True):
        layout.draw(canvas, panel, *corner, heaviest)
    _draw_caption(canvas, caption, below, heaviest)
    canvas.save(path)


def _place_panels(sizes: Sequence[tuple[float, float]], in_a_row: bool) -> list[tuple[float, float]]:
    corners, at = [], _MARGIN
    for width, height in sizes:
        corners.append((at, _MARGIN) if in_a_row else (_MARGIN, at))
        at += (width if in_a_row else height) + _BETWEEN
    return corners


def _write_caption(axes: str | None, numbers: bool) -> list[str]:
    if axes is None:
        return []
    place = "; number: its place in the group" if numbers else ""
    colour = f"colour: the {axes} group of a GPU's rank{place}"
    return [colour, "communication of one step as modelled, without overlap"]


def _draw_caption(canvas: Canvas, caption: Sequence[str], y: float, heaviest: float) -> None:
    for number, line in enumerate(caption):
        canvas.write_text(_MARGIN, y + number * _LINE_HEIGHT + 4, line, _CAPTION, color=FAINT_COLOUR)
    if heaviest:
        _draw_scale(canvas, y + len(caption) * _LINE_HEIGHT + 4, heaviest)


def _draw_scale(canvas: Canvas, y: float, heaviest: float) -> None:
    """Draw the scale of link colours."""
    steps, step = 40, 3.0
    label = "link busy in one step: 0"
    left = _MARGIN + measure_text(label, _CAPTION) + 6
    canvas.write_text(_MARGIN, y, label, _CAPTION, color=FAINT_COLOUR)
    for number in range(steps):
        colour = choose_load_colour((number + 1) / steps, 1.0)
        canvas.draw_box(left + number * step, y - 4, step, 8, facecolor=colour, linewidth=0)
    canvas.write_text(left + steps * step + 6, y, format_seconds(heaviest), _CAPTION, color=FAINT_COLOUR)
