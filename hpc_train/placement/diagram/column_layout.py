"""Lay out a few nodes: switches above, under each leaf (or NVLink domain) a column of nodes with their GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_train.placement.diagram.canvas import (
    FAINT_COLOUR,
    INK_COLOUR,
    LINE_COLOUR,
    PLAIN_COLOUR,
    Canvas,
    choose_group_colour,
    choose_ink,
    choose_load_colour,
    choose_load_width,
    measure_text,
)
from hpc_train.placement.diagram.panel import DrawnLevel, Layout, Panel, select_drawn_levels
from hpc_train.units import format_seconds

_TITLE, _HEAD, _RISE, _BUS, _GAP = 30.0, 18.0, 30.0, 16.0, 16.0
"""Heights of title, switch and links above it; widths of the vertical line of a column and between columns."""
_SMALL, _NAME = 6.5, 7.5
"""Sizes of type."""
_LEAST_COLUMN, _LEAST_NAME, _BUSY = 100.0, 40.0, 50.0
"""Least widths of a column and of a name; width that the busy time of a link takes. All in points."""
_OVERHANG = 12.0
"""Width of a switch beyond the outermost links to it, points."""
_MAX_NUMBERS = 100
"""Largest group whose cells have room for the rank's number in the group."""


@dataclass(frozen=True)
class ColumnSizes:
    """Sizes in one column, points."""

    cell: float
    cells_a_row: int
    name: float
    ranks: float
    node: float
    """Height of a node."""
    nodes: int
    """Number of nodes in the tallest column."""

    @property
    def column(self) -> float:
        return max(_BUS + self.name + self.cells_a_row * self.cell + self.ranks, _LEAST_COLUMN)


def _measure(panel: Panel) -> tuple[float, float]:
    """Return (width, height) of the panel, points."""
    drawn, sizes = select_drawn_levels(panel), _choose_sizes(panel)
    columns = len(drawn[0].level.labels) if drawn else 1
    width = columns * (sizes.column + _GAP) - _GAP
    return max(width, measure_text(panel.title, 10, bold=True)), _measure_top(
        drawn
    ) + _HEAD + 8 + sizes.nodes * sizes.node


def _has_rank_numbers(panel: Panel) -> bool:
    """Whether each cell shows the number that its rank has in its group."""
    return panel.place is not None and int(panel.place.max()) < _MAX_NUMBERS


def _draw(canvas: Canvas, panel: Panel, x: float, y: float, heaviest: float) -> None:
    """Draw the panel with its top left corner at (x, y)."""
    drawn, sizes = select_drawn_levels(panel), _choose_sizes(panel)
    canvas.write_text(x, y + 8, panel.title, 10, fontweight="bold")
    centres = _draw_columns(canvas, panel, drawn, sizes, (x, y + _measure_top(drawn)), heaviest)
    for number in range(1, len(drawn)):
        centres = _draw_row(
            canvas, panel, drawn, number, centres, y + _measure_top(drawn) - number * (_HEAD + _RISE), heaviest
        )
    if drawn and len(centres) > 1:
        _draw_root(canvas, panel, drawn[-1], centres, y + _TITLE - 6, heaviest)


def _measure_top(drawn: list[DrawnLevel]) -> float:
    """Return the distance from the panel's top to its leaves: a row for every level above, and one for the network."""
    rows = max(len(drawn) - 1, 0) + (1 if drawn and len(drawn[-1].level.labels) > 1 else 0)
    return _TITLE - 6 + rows * (_HEAD + _RISE)


def _choose_sizes(panel: Panel) -> ColumnSizes:
    drawn = select_drawn_levels(panel)
    counts = [len(nodes) for nodes in panel.list_members(drawn[0].level)] if drawn else [len(panel.names)]
    few = len(counts) <= 3
    cell, a_row = (12.0, 8) if few else (10.0, 4)
    a_row = min(panel.gpus, a_row)
    name = min(max(measure_text(name, _NAME) for name in panel.names) + 6, 130.0 if few else 80.0)
    ranks = 0.0
    if panel.first_rank is not None and few:
        ranks = measure_text(_list_ranks(panel, int(panel.first_rank.argmax())), _SMALL) + 8
    return ColumnSizes(cell, a_row, name, ranks, max(-(-panel.gpus // max(a_row, 1)), 1) * cell + 4, max(counts))


def _draw_columns(
    canvas: Canvas,
    panel: Panel,
    drawn: list[DrawnLevel],
    sizes: ColumnSizes,
    corner: tuple[float, float],
    heaviest: float,
) -> dict[int, tuple[float, float]]:
    """Draw the lowest level; maps each of its groups to the middle of its box's upper edge."""
    members = panel.list_members(drawn[0].level) if drawn else [panel.order]
    # In the order of the placement, so that neighbouring ranks are drawn next to each other.
    by_place = sorted(range(len(members)), key=lambda group: panel.order.index(members[group][0]))
    centres = {}
    for number, group in enumerate(by_place):
        x, y = corner[0] + number * (sizes.column + _GAP), corner[1]
        if drawn:
            _draw_head(canvas, panel, drawn[0], group, (x, y, sizes.column), heaviest)
        else:
            _draw_box(canvas, "network", None, f"{panel.key}-switch-network", (x, y, sizes.column), heaviest)
        centres[group] = (x + sizes.column / 2, y)
        _draw_nodes(canvas, panel, members[group], (x, y + _HEAD), sizes, heaviest)
    return centres


def _draw_head(
    canvas: Canvas, panel: Panel, drawn: DrawnLevel, group: int, place: tuple[float, float, float], heaviest: float
) -> None:
    level = drawn.level
    label = level.labels[group]
    busy = drawn.get_load(group)
    if level.name == "domain" and measure_text(f"NVLink {label}", _NAME, bold=True) < place[2] - _BUSY * (
        busy is not None
    ):
        label = f"NVLink {label}"
    _draw_box(canvas, label, busy, f"{panel.key}-{level.name}-{group}", place, heaviest)


def _draw_box(
    canvas: Canvas, label: str, load: float | None, gid: str, place: tuple[float, float, float], heaviest: float
) -> None:
    """Draw a switch: its name on the left, how long its uplink is busy on the right."""
    x, y, width = place
    colour = choose_load_colour(load, heaviest)
    canvas.draw_box(x, y, width, _HEAD, facecolor="#f3f6f9", edgecolor=colour, linewidth=1.2, gid=gid)
    busy = "" if load is None else format_seconds(load)
    room = width - 10 - (measure_text(busy, _SMALL) + 6 if busy else 0)
    if busy and room < measure_text(label, _NAME, bold=True) and room < _LEAST_NAME:
        busy, room = "", width - 10
    canvas.write_text(x + 5, y + _HEAD / 2, label, _NAME, room, fontweight="bold")
    canvas.write_text(
        x + width - 5, y + _HEAD / 2, busy, _SMALL, ha="right", color=FAINT_COLOUR if not load else INK_COLOUR
    )


def _draw_nodes(
    canvas: Canvas, panel: Panel, nodes: list[int], corner: tuple[float, float], sizes: ColumnSizes, heaviest: float
) -> None:
    x, top = corner[0] + 5, corner[1] + 8
    last = top + (len(nodes) - 1) * sizes.node + (sizes.node - 4) / 2
    canvas.draw_line((x, corner[1]), (x, last), color=LINE_COLOUR, linewidth=1.5)
    for number, node in enumerate(nodes):
        _draw_node(canvas, panel, node, (x, top + number * sizes.node), sizes, heaviest)


def _draw_node(
    canvas: Canvas, panel: Panel, node: int, corner: tuple[float, float], sizes: ColumnSizes, heaviest: float
) -> None:
    """Draw a node: its link to the bus, its name, its GPUs and its ranks."""
    x, y = corner
    middle = y + (sizes.node - 4) / 2
    load = panel.get_load(panel.levels[0], node)
    style = {"color": choose_load_colour(load, heaviest), "linewidth": choose_load_width(load, heaviest)}
    canvas.draw_line((x, middle), (x + _BUS - 7, middle), gid=f"{panel.key}-link-node-{node}", **style)
    canvas.write_text(x + _BUS - 5, middle, panel.names[node], _NAME, sizes.name)
    left = x + _BUS - 5 + sizes.name
    for gpu in range(panel.gpus):
        row, column = divmod(gpu, sizes.cells_a_row)
        _draw_gpu(canvas, panel, (node, gpu), (left + column * sizes.cell, y + row * sizes.cell), sizes.cell)
    if sizes.ranks:
        right = left + sizes.cells_a_row * sizes.cell + 6
        canvas.write_text(right, middle, _list_ranks(panel, node), _SMALL, color=FAINT_COLOUR)


def _draw_gpu(canvas: Canvas, panel: Panel, slot: tuple[int, int], corner: tuple[float, float], cell: float) -> None:
    colour = (
        PLAIN_COLOUR
        if panel.colour is None
        else choose_group_colour(int(panel.colour[slot]), int(panel.colour.max()) + 1)
    )
    gid = f"{panel.key}-gpu-{slot[0]}-{slot[1]}"
    canvas.draw_box(corner[0], corner[1], cell - 1, cell - 1, facecolor=colour, linewidth=0, gid=gid)
    if panel.place is not None and _has_rank_numbers(panel):
        size = 6.0 if cell > 10 else 5.0
        middle = corner[0] + (cell - 1) / 2, corner[1] + (cell - 1) / 2
        canvas.write_text(*middle, str(panel.place[slot]), size, ha="center", color=choose_ink(colour))


def _list_ranks(panel: Panel, node: int) -> str:
    assert panel.first_rank is not None
    first = int(panel.first_rank[node])
    return f"rank {first}" if panel.gpus == 1 else f"ranks {first}-{first + panel.gpus - 1}"


def _draw_row(
    canvas: Canvas,
    panel: Panel,
    drawn: list[DrawnLevel],
    number: int,
    below: dict[int, tuple[float, float]],
    y: float,
    heaviest: float,
) -> dict[int, tuple[float, float]]:
    """Draw one level of boxes above the last one, with the links between them."""
    inner, outer = drawn[number - 1], drawn[number]
    children_of: dict[int, list[int]] = {}
    for child in below:
        node = int((inner.level.group == child).argmax())
        children_of.setdefault(int(outer.level.group[node]), []).append(child)
    centres = {}
    for group, children in children_of.items():
        left, right = (pick(below[child][0] for child in children) for pick in (min, max))
        width = max(right - left + _OVERHANG, 110.0)
        middle = (left + right) / 2
        _draw_head(canvas, panel, outer, group, (middle - width / 2, y, width), heaviest)
        for child in children:
            _draw_link(canvas, panel, inner, child, below[child], (below[child][0], y + _HEAD), heaviest)
        centres[group] = (middle, y)
    return centres


def _draw_root(
    canvas: Canvas, panel: Panel, drawn: DrawnLevel, below: dict[int, tuple[float, float]], y: float, heaviest: float
) -> None:
    """Draw the network that joins the outermost groups; no source names it."""
    left, right = min(x for x, _ in below.values()), max(x for x, _ in below.values())
    width = max(right - left + 40, 90.0)
    middle = (left + right) / 2
    _draw_box(canvas, "network", None, f"{panel.key}-switch-network", (middle - width / 2, y, width), heaviest)
    for group, top in below.items():
        _draw_link(canvas, panel, drawn, group, top, (top[0], y + _HEAD), heaviest)


def _draw_link(
    canvas: Canvas,
    panel: Panel,
    drawn: DrawnLevel,
    group: int,
    start: tuple[float, float],
    end: tuple[float, float],
    heaviest: float,
) -> None:
    load = drawn.get_load(group)
    style: dict[str, Any] = {
        "color": choose_load_colour(load, heaviest),
        "linewidth": choose_load_width(load, heaviest),
    }
    canvas.draw_line(start, end, gid=f"{panel.key}-link-{drawn.level.name}-{group}", **style)


COLUMN_LAYOUT = Layout(_measure, _draw, _has_rank_numbers)
