"""Lay out many nodes: one row per leaf with its nodes as thin cells, and a bar for how long its uplink is busy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.diagram.canvas import (
    FAINT_COLOUR,
    INK_COLOUR,
    LINE_COLOUR,
    PLAIN_COLOUR,
    Canvas,
    choose_group_colour,
    choose_load_colour,
    measure_text,
)
from hpc_train.placement.diagram.panel import DrawnLevel, Layout, Panel, select_drawn_levels
from hpc_train.placement.fabric import pluralise_level
from hpc_train.units import format_seconds

MAX_ROWS = 64
"""Maximum rows of a block; if the lowest level has more groups, rows are those of a level above, or only the first."""
_TITLE, _HEAD, _BLOCK = 26.0, 14.0, 10.0
_STRIP, _BAR, _VALUE, _GAP = 300.0, 100.0, 46.0, 8.0
_ROWS = ((6, 28.0), (20, 17.0), (MAX_ROWS, 11.0))
"""Number of rows up to which rows have this height."""
_WIDEST_CELL, _THIN = 24.0, 3.0
_MAX_CELLS = 256
"""Maximum number of nodes that are shapes of their own: a shape takes a millisecond to draw and 200 bytes of the
file."""
_SIZE = 7.0
_WIDEST_NAME = 110.0


@dataclass(frozen=True)
class RowBlock:
    """The rows of one level; only the first block shows nodes."""

    drawn: DrawnLevel
    groups: list[int]
    """Groups in drawing order."""
    left_out: int
    row: float
    """Height of a row, points."""

    @property
    def height(self) -> float:
        return _HEAD + self.row * len(self.groups) + _BLOCK


def _measure(panel: Panel) -> tuple[float, float]:
    """Return (width, height) of the panel, points."""
    blocks = _make_blocks(panel)
    height = sum(block.height for block in blocks)
    width = _measure_names(blocks) + _GAP + _measure_strip(panel) + _measure_bars(panel)
    return max(width, measure_text(panel.title, 10, bold=True)), _TITLE + height


def _draw(canvas: Canvas, panel: Panel, x: float, y: float, heaviest: float) -> None:
    """Draw the panel with its top left corner at (x, y)."""
    canvas.write_text(x, y + 8, panel.title, 10, fontweight="bold")
    blocks = _make_blocks(panel)
    name, top = _measure_names(blocks), y + _TITLE
    for number, block in enumerate(blocks):
        _draw_block(canvas, panel, block, (x, top), name, heaviest, cells=number == 0)
        top += block.height


def _make_blocks(panel: Panel) -> list[RowBlock]:
    drawn = select_drawn_levels(panel)
    if not drawn:
        everything = type(panel.levels[0])("all", np.zeros(len(panel.names), np.int64), ("all nodes",))
        drawn = [DrawnLevel(everything, None)]
    few = [row for row in drawn if len(row.level.labels) <= MAX_ROWS] or drawn[-1:]
    blocks = []
    for drawn_level in few:
        if drawn_level is few[0] or len(drawn_level.level.labels) > 1:
            order = list(dict.fromkeys(int(drawn_level.level.group[node]) for node in panel.order))
            shown = order[:MAX_ROWS]
            # Only the first block shows nodes, so only its rows may be high.
            rows = len(shown) if drawn_level is few[0] else MAX_ROWS
            height = next(height for limit, height in _ROWS if rows <= limit)
            blocks.append(RowBlock(drawn_level, shown, len(order) - len(shown), height))
    return blocks


def _measure_names(blocks: list[RowBlock]) -> float:
    labels = [measure_text(block.drawn.level.labels[group], _SIZE) for block in blocks for group in block.groups]
    return min(max(labels), _WIDEST_NAME) + 4


def _measure_strip(panel: Panel) -> float:
    return _STRIP if len(panel.names) > 1 else 60.0


def _measure_bars(panel: Panel) -> float:
    return _GAP + _BAR + 4 + _VALUE if panel.load else 0.0


def _draw_block(
    canvas: Canvas,
    panel: Panel,
    block: RowBlock,
    corner: tuple[float, float],
    name: float,
    heaviest: float,
    cells: bool,
) -> None:
    """Draw the rows of one level. name: width of the labels' column; cells: whether nodes are drawn or counted."""
    level = block.drawn.level
    members = panel.list_members(level)
    most_nodes = max(len(members[group]) for group in block.groups)
    strip = corner[0] + name + _GAP
    bars = strip + _measure_strip(panel) + _GAP
    _draw_header(canvas, panel, block, most_nodes, corner, bars)
    for number, group in enumerate(block.groups):
        top = corner[1] + _HEAD + number * block.row
        height = block.row - 1
        gid = f"{panel.key}-{level.name}-{group}"
        canvas.draw_box(corner[0], top, name, height, facecolor="white", linewidth=0, gid=gid)
        canvas.write_text(corner[0], top + height / 2, level.labels[group], _SIZE, name - 2)
        if cells:
            _draw_cells(canvas, panel, members[group], (strip, top), (_measure_strip(panel) / most_nodes, height))
        else:
            canvas.write_text(strip, top + height / 2, f"{len(members[group])} nodes", _SIZE, color=FAINT_COLOUR)
        _draw_bar(canvas, panel, block.drawn, group, (bars, top + height / 2), heaviest)


def _draw_header(
    canvas: Canvas, panel: Panel, block: RowBlock, most_nodes: int, corner: tuple[float, float], bars: float
) -> None:
    name = block.drawn.level.name
    rest = f", the first {len(block.groups)} of {len(block.drawn.level.labels)}" if block.left_out else ""
    canvas.write_text(corner[0], corner[1] + 5, f"{pluralise_level(name)}, up to {most_nodes} nodes each{rest}", _SIZE)
    if panel.load:
        canvas.write_text(bars, corner[1] + 5, "uplink busy a step", _SIZE)


def _draw_cells(
    canvas: Canvas, panel: Panel, nodes: list[int], corner: tuple[float, float], size: tuple[float, float]
) -> None:
    """Draw one cell per node; if cells are thin, or there are many, those of a row are one image."""
    width = min(size[0], _WIDEST_CELL)
    if width < _THIN or panel.nodes > _MAX_CELLS:
        colours = np.full((len(nodes), 1), -1) if panel.colour is None else panel.colour[nodes]
        gid = f"{panel.key}-nodes-{nodes[0]}"
        canvas.draw_image(*corner, width * len(nodes), size[1], _make_pixels(colours, panel), gid)
        return
    for number, node in enumerate(nodes):
        _draw_node(canvas, panel, node, (corner[0] + number * width, corner[1]), (width - 0.6, size[1]))


def _make_pixels(colours: NDArray[np.int64], panel: Panel) -> NDArray[np.uint8]:
    """Convert colours [nodes, GPUs] to pixels [GPUs, nodes, 3]."""
    groups = 0 if panel.colour is None else int(panel.colour.max()) + 1
    palette = [choose_group_colour(number, groups) for number in range(groups)] + [PLAIN_COLOUR]
    rgb = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in palette], np.uint8)
    pixels: NDArray[np.uint8] = rgb[colours.T]
    return pixels


def _draw_node(canvas: Canvas, panel: Panel, node: int, corner: tuple[float, float], size: tuple[float, float]) -> None:
    """Draw the colours of a node's GPUs one above the other."""
    gid = f"{panel.key}-node-{node}"
    if panel.colour is None:
        canvas.draw_box(*corner, *size, facecolor=PLAIN_COLOUR, linewidth=0, gid=gid)
        return
    groups = int(panel.colour.max()) + 1
    groups_on_node = list(dict.fromkeys(panel.colour[node].tolist()))
    height = size[1] / len(groups_on_node)
    for number, group in enumerate(groups_on_node):
        style = {"facecolor": choose_group_colour(group, groups), "gid": f"{gid}-{number}" if number else gid}
        canvas.draw_box(corner[0], corner[1] + number * height, size[0], height, linewidth=0, **style)


def _draw_bar(
    canvas: Canvas, panel: Panel, drawn: DrawnLevel, group: int, left: tuple[float, float], heaviest: float
) -> None:
    """Draw how long a link is busy. left: the middle of the bar's left edge."""
    load = drawn.get_load(group)
    if load is None:
        return
    x, y = left
    canvas.draw_box(x, y - 4, _BAR, 8, facecolor="#f3f6f9", edgecolor=LINE_COLOUR, linewidth=0.4)
    length = _BAR * (load / heaviest if heaviest else 0.0)
    gid = f"{panel.key}-link-{drawn.level.name}-{group}"
    canvas.draw_box(x, y - 4, length, 8, facecolor=choose_load_colour(load, heaviest), linewidth=0, gid=gid)
    canvas.write_text(x + _BAR + 4, y, format_seconds(load), _SIZE - 0.5, color=INK_COLOUR if load else FAINT_COLOUR)


ROW_LAYOUT = Layout(_measure, _draw, has_rank_numbers=lambda panel: False)
