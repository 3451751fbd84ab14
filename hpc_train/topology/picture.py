"""Pictures: one panel of a machine, or two of a run's ranks before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.tree import paths_of
from hpc_train.errors import UserError
from hpc_train.placement.levels import levels_of
from hpc_train.topology import columns, rows
from hpc_train.topology.canvas import FAINT, Canvas, text_width
from hpc_train.topology.colours import load_colour, seconds
from hpc_train.topology.drawn import drawn_levels, one_by_one
from hpc_train.topology.panel import Panel

_MARGIN, _BETWEEN, _WIDEST = 18.0, 36.0, 1500.0
_CAPTION, _LINE = 8.0, 14.0


def draw_cluster(cluster: Cluster, path: Path) -> None:
    """The switches, nodes and GPUs of a cluster. Raises UserError where there is no node, and as `draw` does."""
    paths = {node: path for node, path in paths_of(cluster).items() if path}
    names = list(dict.fromkeys([*(node.name for node in cluster.nodes), *paths]))
    if not names:
        raise UserError(f"--picture {path}: there is no node to draw")
    domains = {node.name: clique for node in cluster.nodes for gpu in node.gpus if (clique := gpu.clique) is not None}
    gpus = max((len(node.gpus) for node in cluster.nodes), default=0)
    levels = levels_of(names, paths, domains)
    title = f"{cluster.kind}: {len(names)} node{'s' * (len(names) != 1)}{f' x {gpus} GPUs' if gpus else ''}"
    draw([Panel("here", title, levels, gpus)], None, path)


def draw(panels: Sequence[Panel], axes: str | None, path: Path) -> None:
    """The panels side by side, or one above the other where that is too wide, and what they mean below.

    axes: those whose groups colour the GPUs. Raises UserError, one line, where the file cannot be written.
    """
    layouts = [columns if one_by_one(panel, drawn_levels(panel)) else rows for panel in panels]
    sizes = [layout.size_of(panel) for layout, panel in zip(layouts, panels, strict=True)]
    heaviest = max(panel.heaviest for panel in panels)
    beside = sum(width for width, _ in sizes) + _BETWEEN * (len(sizes) - 1) <= _WIDEST
    corners = _corners(sizes, beside)
    numbers = columns in layouts and all(it.place is not None and columns.numbered(it) for it in panels)
    caption = _caption(axes, numbers)
    width = max(x + size[0] for (x, _), size in zip(corners, sizes, strict=True)) + _MARGIN
    width = max(width, *(text_width(line, _CAPTION) + 2 * _MARGIN for line in caption), 340.0)
    below = max(y + size[1] for (_, y), size in zip(corners, sizes, strict=True)) + 12
    canvas = Canvas(width, below + _LINE * (len(caption) + (1 if heaviest else 0)) + _MARGIN)
    for layout, panel, corner in zip(layouts, panels, corners, strict=True):
        layout.draw(canvas, panel, *corner, heaviest)
    _draw_caption(canvas, caption, below, heaviest)
    canvas.save(path)


def _corners(sizes: Sequence[tuple[float, float]], beside: bool) -> list[tuple[float, float]]:
    corners, at = [], _MARGIN
    for width, height in sizes:
        corners.append((at, _MARGIN) if beside else (_MARGIN, at))
        at += (width if beside else height) + _BETWEEN
    return corners


def _caption(axes: str | None, numbers: bool) -> list[str]:
    if axes is None:
        return []
    place = "; number: its place in the group" if numbers else ""
    colour = f"colour: the {axes} group of a GPU's rank{place}"
    return [colour, "communication of one step as modelled, without overlap"]


def _draw_caption(canvas: Canvas, caption: Sequence[str], y: float, heaviest: float) -> None:
    for number, line in enumerate(caption):
        canvas.text(_MARGIN, y + number * _LINE + 4, line, _CAPTION, color=FAINT)
    if heaviest:
        _draw_scale(canvas, y + len(caption) * _LINE + 4, heaviest)


def _draw_scale(canvas: Canvas, y: float, heaviest: float) -> None:
    """What the colour of a link means."""
    steps, step = 40, 3.0
    label = "link busy in one step: 0"
    left = _MARGIN + text_width(label, _CAPTION) + 6
    canvas.text(_MARGIN, y, label, _CAPTION, color=FAINT)
    for number in range(steps):
        colour = load_colour((number + 1) / steps, 1.0)
        canvas.box(left + number * step, y - 4, step, 8, facecolor=colour, linewidth=0)
    canvas.text(left + steps * step + 6, y, seconds(heaviest), _CAPTION, color=FAINT)
