"""Canvas: a sheet whose unit is the typographic point, so that a text's size is known where it is placed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError
from hpc_train.topology.folding import printable

SUFFIXES = (".svg", ".png", ".pdf")
INK = "#1f2328"
FAINT = "#8c959f"
LINE = "#d0d7de"
_FONT = "DejaVu Sans"
_DPI = 160


@dataclass
class Canvas:
    """Things to draw; the origin is the top left corner, y grows downwards."""

    width: float
    height: float
    rectangles: list[tuple[float, float, float, float, dict[str, Any]]] = field(default_factory=list)
    lines: list[tuple[tuple[float, float], tuple[float, float], dict[str, Any]]] = field(default_factory=list)
    texts: list[tuple[float, float, str, dict[str, Any]]] = field(default_factory=list)
    images: list[tuple[float, float, float, float, NDArray[np.uint8]]] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """style: of matplotlib's Rectangle; gid names it in an SVG."""
        self.rectangles.append((x, y, width, height, {"linewidth": 0.5, "edgecolor": "white", **style}))

    def line(self, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
        """style: of matplotlib's Line2D."""
        self.lines.append((start, end, {"solid_capstyle": "butt", "zorder": 1, **style}))

    def text(self, x: float, y: float, text: str, size: float, room: float | None = None, **style: Any) -> None:
        """Centred on y; room: points that it may take, beyond which it is cut in the middle."""
        shown = printable(text)
        if room is not None:
            shown = shortened(shown, size, room, style.get("fontweight") == "bold")
        self.texts.append((x, y, shown, {"fontsize": size, "va": "center", "color": INK, "zorder": 4, **style}))

    def image(self, x: float, y: float, width: float, height: float, pixels: NDArray[np.uint8], gid: str) -> None:
        """pixels: [rows, columns, 3]; what would be thousands of rectangles."""
        self.images.append((x, y, width, height, pixels))
        self.box(x, y, width, height, facecolor="none", linewidth=0, gid=gid)  # images have no id in an SVG

    def save(self, path: Path) -> None:
        """Raises UserError for another suffix, a folder that is not there, and without matplotlib."""
        check_picture(path)
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"svg.hashsalt": "hpc_train", "font.family": _FONT}):
            figure = Figure(figsize=(self.width / 72, self.height / 72), facecolor="white")
            self._fill(figure.add_axes((0, 0, 1, 1)))
            undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
            try:
                figure.savefig(path, dpi=_DPI, metadata=undated)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}") from None

    def _fill(self, axes: Any) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle

        axes.set_axis_off()
        for x, y, width, height, style in self.rectangles:
            axes.add_patch(Rectangle((x, y), width, height, **{"zorder": 2, **style}))
        for x, y, width, height, pixels in self.images:
            extent = (x, x + width, y + height, y)
            axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", zorder=2)
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        for start, end, style in self.lines:
            axes.add_line(Line2D((start[0], end[0]), (start[1], end[1]), **style))
        for x, y, text, style in self.texts:
            axes.text(x, y, text, parse_math=False, **style)


def check_picture(path: Path) -> None:
    """Raises UserError, one line, where a picture cannot be written, before anything is computed for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--picture {path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.parent.is_dir():
        raise UserError(f"--picture {path}: no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--picture needs matplotlib: pip install 'hpc_train[plot]'") from None


@lru_cache(maxsize=1 << 16)
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=_FONT, size=size, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, False)[0])


def shortened(text: str, size: float, room: float, bold: bool = False) -> str:
    """The text, or its beginning and end, so that it takes no more than `room` points."""
    if text_width(text, size, bold) <= room:
        return text
    cuts = [f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}" for kept in range(len(text))]
    fitting = bisect_right(cuts, room, key=lambda cut: text_width(cut, size, bold))
    return cuts[fitting - 1] if fitting else ""
