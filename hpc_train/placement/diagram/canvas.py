"""Canvas: collect boxes, lines and texts in typographic points, and save them with matplotlib.

In points the size of a text is known where it is placed. The colours of groups and loads are here too.
"""

from __future__ import annotations

import colorsys
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError
from hpc_train.terminal import one_line

PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
INK_COLOUR = "#1f2328"
FAINT_COLOUR = "#8c959f"
LINE_COLOUR = "#d0d7de"
IDLE_COLOUR = "#c9d1d9"
"""Colour of a link whose load is unknown or zero."""
PLAIN_COLOUR = "#9fb4c7"
"""Colour of a GPU that is in no group."""
_DISTINCT = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d",
    "#2f4b7c", "#ff9da6", "#8cd17d", "#79706e",
)  # fmt: skip
"""Colours that are easily told apart, for that many groups."""
_LIGHT, _MIDDLE, _HEAVY = (254, 217, 118), (252, 78, 42), (177, 0, 38)
"""Red, green and blue of a link with little load, with half of the heaviest, and with the heaviest."""
_FONT = "DejaVu Sans"
_DPI = 160


def choose_group_colour(number: int, groups: int) -> str:
    """Return the colour of a group.

    A few groups have distinct colours; of many, neighbours are alike, so that order looks smooth.
    """
    if groups <= len(_DISTINCT):
        return _DISTINCT[number % len(_DISTINCT)]
    at = number / groups
    # Not the whole circle of hues, whose end is its beginning; and every other group is lighter, to show the border.
    red, green, blue = colorsys.hls_to_rgb(at * 0.92, 0.44 + 0.14 * (number % 2), 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def choose_ink(colour: str) -> str:
    """Return black or white, whichever is more legible on the colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    luma = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601: what the eye makes of the three
    return INK_COLOUR if luma > 150 else "white"


def choose_load_colour(load: float | None, heaviest: float) -> str:
    """Return a colour from yellow to dark red, by the share of the heaviest load."""
    if not load or not heaviest:
        return IDLE_COLOUR
    share = min(load / heaviest, 1.0)
    first, second, at = (_LIGHT, _MIDDLE, share * 2) if share < 0.5 else (_MIDDLE, _HEAVY, share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(first, second, strict=True))


def choose_load_width(load: float | None, heaviest: float) -> float:
    """Return the width of a link, points."""
    return 1.2 if not load or not heaviest else 1.2 + 5.8 * min(load / heaviest, 1.0)


@dataclass
class Canvas:
    """A sheet to draw on; the origin is the top left corner, y grows downwards."""

    width: float
    height: float
    rectangles: list[tuple[float, float, float, float, dict[str, Any]]] = field(default_factory=list)
    lines: list[tuple[tuple[float, float], tuple[float, float], dict[str, Any]]] = field(default_factory=list)
    texts: list[tuple[float, float, str, dict[str, Any]]] = field(default_factory=list)
    images: list[tuple[float, float, float, float, NDArray[np.uint8]]] = field(default_factory=list)

    def draw_box(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """Draw a rectangle. style: of matplotlib's Rectangle; gid becomes its id in an SVG."""
        self.rectangles.append((x, y, width, height, {"linewidth": 0.5, "edgecolor": "white", **style}))

    def draw_line(self, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
        """Draw a line. style: of matplotlib's Line2D."""
        self.lines.append((start, end, {"solid_capstyle": "butt", "zorder": 1, **style}))

    def write_text(self, x: float, y: float, text: str, size: float, room: float | None = None, **style: Any) -> None:
        """Write a text centred on y. room: points that it may take, beyond which its middle is cut."""
        shown = one_line(text)
        if room is not None:
            shown = shorten_text(shown, size, room, style.get("fontweight") == "bold")
        self.texts.append((x, y, shown, {"fontsize": size, "va": "center", "color": INK_COLOUR, "zorder": 4, **style}))

    def draw_image(self, x: float, y: float, width: float, height: float, pixels: NDArray[np.uint8], gid: str) -> None:
        """Draw pixels [rows, columns, 3] in place of thousands of rectangles."""
        self.images.append((x, y, width, height, pixels))
        self.draw_box(x, y, width, height, facecolor="none", linewidth=0, gid=gid)  # images have no id in an SVG

    def save(self, path: Path) -> None:
        """Write the picture. Raises UserError for another suffix, a missing folder, and without matplotlib."""
        check_picture_path(path)
        import matplotlib
        from matplotlib.figure import Figure

        # The same picture is the same file: no random ids in an SVG, and no date.
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


def check_picture_path(path: Path) -> None:
    """Raise UserError, one line, if no picture can be written there; called before anything is computed for it."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise UserError(
            f"--picture {path}: the name must end in {', '.join(PICTURE_SUFFIXES[:-1])} or {PICTURE_SUFFIXES[-1]}"
        )
    if not path.parent.is_dir():
        raise UserError(f"--picture {path}: no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--picture needs matplotlib: pip install 'hpc_train[plot]'") from None


@lru_cache(maxsize=1 << 16)
def measure_text(text: str, size: float, bold: bool = False) -> float:
    """Return the width of a text, points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path  # measures outlines of letters, which takes no canvas

    font = FontProperties(family=_FONT, size=size, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, False)[0])


def shorten_text(text: str, size: float, room: float, bold: bool = False) -> str:
    """Cut the middle of a text so that it takes no more than `room` points."""
    if measure_text(text, size, bold) <= room:
        return text
    cuts = [f"{text[: length - length // 2]}…{text[len(text) - length // 2 :]}" for length in range(len(text))]
    fitting = bisect_right(cuts, room, key=lambda cut: measure_text(cut, size, bold))
    return cuts[fitting - 1] if fitting else ""
