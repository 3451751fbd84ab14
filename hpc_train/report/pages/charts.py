"""Draw the charts of the report page as SVG: no script, no network, colours by CSS classes of the page.

Every chart is a self-contained <svg>; texts are escaped here, so that the page may include it as it is.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from hpc_train.report.step_table import Array
from hpc_train.report.sweep_results import is_number, spans_decades
from hpc_train.units import format_seconds

WIDTH, HALF = 920, 440
"""Widths of charts, in pixels at their usual size: a whole row of the page, and half of one."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 18, 30
_MAX_POINTS = 360
_CHARACTER = 6.2
"""Width of a character of the labels, in pixels: an average, as only the browser knows its font."""
_LEAST_GAP = 11.0
"""Pixels between two labels one above the other."""


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    """None, NaN and infinity leave a gap."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at an event."""

    x: float
    kind: str
    """CSS class: save, attempt, skip or rollback."""
    text: str


@dataclass(frozen=True)
class Span:
    """A bar of a Gantt chart."""

    row: int
    start: float
    end: float
    kind: str
    """F, B, I, W or L."""
    text: str = ""


def downsample(x: Sequence[float], y: Sequence[float | None]) -> list[tuple[float, float]]:
    """Keep the lowest and the highest value of each of _MAX_POINTS / 2 groups, so that no spike is lost."""
    points = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    if len(points) <= _MAX_POINTS:
        return points
    extremes: list[tuple[float, float]] = []
    groups = _MAX_POINTS // 2
    for index in range(groups):
        group = points[index * len(points) // groups : (index + 1) * len(points) // groups]
        extremes += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return extremes


def choose_ticks(low: float, high: float, maximum: int = 5) -> list[float]:
    """Return round numbers between low and high, at most `maximum` + 1."""
    if not high > low:
        return [low]
    rough = (high - low) / maximum
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def format_tick(value: float) -> str:
    """Format a number of an axis, such as 0.002, 1.5, 200k or 3M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if suffix == "k" else limit
            return f"{value / scale:g}{suffix}"
    return f"{value:.4g}"


def _write_text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


class _Axes:
    """Maps values to the chart's coordinates, and draws frame, ticks and labels."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], width: int, height: int, log: bool) -> None:
        self.width, self.height, self.log = width, height, log
        self._x, self._y = _widen(*x), _widen(*y) if not log else (math.log10(y[0]), math.log10(max(y[1], y[0] * 1.01)))

    def place_x(self, x: float) -> float:
        low, high = self._x
        return _LEFT + (x - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def place_y(self, y: float) -> float:
        low, high = self._y
        value = math.log10(y) if self.log else y
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def draw_frame(self, x_label: str, y_label: str) -> list[str]:
        parts = []
        for tick in self._choose_y_ticks():
            y = self.place_y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_write_text("tick", _LEFT - 6, y + 3.5, format_tick(tick), "end"))
        for tick in choose_ticks(*self._x, maximum=self.width // 90):
            parts.append(
                _write_text("tick", self.place_x(tick), self.height - _BOTTOM + 14, format_tick(tick), "middle")
            )
        parts.append(_write_text("label", self.width - _RIGHT, self.height - 3, x_label, "end"))
        parts.append(_write_text("label", _LEFT, _TOP - 8, y_label))
        return parts

    def _choose_y_ticks(self) -> list[float]:
        if not self.log:
            return choose_ticks(*self._y)
        low, high = self._y
        decades = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
        return decades if len(decades) > 1 else choose_ticks(10**low, 10**high)


def _widen(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    return low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)


def draw_lines(
    title: str,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    unit: str = "",
    width: int = HALF,
    height: int = 190,
) -> str:
    """Draw values over steps. The axis is logarithmic where the values span decades."""
    drawn = [(line, downsample(line.x, line.y)) for line in series]
    drawn = [(line, points) for line, points in drawn if points]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    axes = _Axes((min(xs), max(xs)), (min(ys), max(ys)), width, height, spans_decades(ys))
    body = axes.draw_frame("step", unit)
    for mark in marks:
        if min(xs) <= mark.x <= max(xs):
            x = axes.place_x(mark.x)
            body.append(
                f'<line class="mark {escape(mark.kind)}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}">'
                f"<title>{escape(mark.text)}</title></line>"
            )
    for index, (line, points) in enumerate(drawn):
        path = "M" + "L".join(f"{axes.place_x(x):.1f} {axes.place_y(y):.1f}" for x, y in points)
        # A path of one point draws nothing: a short line makes its round cap visible as a dot.
        alone = len(points) == 1
        path += "h.1" if alone else ""
        kind = f"line c{index % 6}{' dot' if alone else ''}"
        body.append(f'<path class="{kind}" d="{path}"><title>{escape(line.name)}</title></path>')
    if len(drawn) > 1:
        body += _draw_legend([line.name for line, _ in drawn])
    return _wrap_svg(title, width, height, body)


def _draw_legend(names: Sequence[str]) -> list[str]:
    parts, x = [], _LEFT + 70.0
    for index, name in enumerate(names[:6]):
        parts.append(f'<line class="line c{index}" x1="{x:.0f}" x2="{x + 14:.0f}" y1="{_TOP - 11}" y2="{_TOP - 11}"/>')
        parts.append(f'<text class="tick" x="{x + 18:.0f}" y="{_TOP - 8}">{escape(name[:40])}</text>')
        x += 34 + len(name[:40]) * _CHARACTER
    return parts


def draw_bands(title: str, parts: Sequence[tuple[str, str, float]]) -> str:
    """Draw one stacked bar. parts: (CSS class, what it is, amount)."""
    total = sum(amount for _, _, amount in parts)
    if total <= 0:
        return ""
    body, x, height = [], 0.0, 26
    for kind, text, amount in parts:
        width = amount / total * WIDTH
        if width > 0:
            body.append(
                f'<rect class="band {escape(kind)}" x="{x:.2f}" y="0" width="{width:.2f}" height="{height}">'
                f"<title>{escape(text)}: {amount / total:.1%}</title></rect>"
            )
        x += width
    return _wrap_svg(title, WIDTH, height, body)


def draw_stacks(
    title: str,
    bars: Sequence[tuple[str, Sequence[tuple[str, str, float]]]],
    describe: Callable[[float], str] = format_seconds,
) -> str:
    """Draw stacked bars to one scale, below each other. bars: (name, its parts as in `draw_bands`).

    describe: formats an amount for the text of a part.
    """
    row, label_width, body = 30, 130, []
    longest = max((sum(amount for _, _, amount in parts) for _, parts in bars), default=0.0)
    if longest <= 0:
        return ""
    for index, (name, parts) in enumerate(bars):
        body.append(_write_text("name", 0, index * row + 19, name[:20]))
        x = float(label_width)
        for kind, text, amount in parts:
            width = amount / longest * (WIDTH - label_width)
            body.append(
                f'<rect class="band {escape(kind)}" x="{x:.2f}" y="{index * row + 4}" width="{width:.2f}" '
                f'height="{row - 8}"><title>{escape(text)}: {describe(amount)}</title></rect>'
            )
            x += width
    return _wrap_svg(title, WIDTH, len(bars) * row, body)


_LOW_FACTOR = 0.8
"""Factors below this are flagged."""


def draw_bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """Draw factors between 0 and 1, one bar below the other; low ones are flagged."""
    row, body = 22, []
    for index, (name, value) in enumerate(values):
        y, width = index * row + 4, max(0.0, min(value, 1.0)) * (HALF - 160)
        kind = "low" if value < _LOW_FACTOR else "good"
        body.append(f'<text class="name" x="0" y="{y + 12}">{escape(name)}</text>')
        body.append(f'<rect class="track" x="105" y="{y}" width="{HALF - 160}" height="14" rx="2"/>')
        body.append(f'<rect class="bar {kind}" x="105" y="{y}" width="{width:.1f}" height="14" rx="2"/>')
        body.append(f'<text class="value {kind}" x="{HALF - 44}" y="{y + 12}">{value:.3f}</text>')
    return _wrap_svg(title, HALF, len(values) * row + 6, body)


def draw_heat_map(title: str, values: Array, rows: Sequence[str], steps: Sequence[float]) -> str:
    """Draw a matrix of ratios to the median (1 is white), rows x steps, as an image in an SVG.

    rows: a label each; only as many are printed as there is room for.
    """
    if not values.size:
        return ""
    cell = max(3, min(16, 420 // len(rows)))
    height = len(rows) * cell + 26
    image = base64.b64encode(encode_png(colour_ratios(values))).decode()
    width = WIDTH - 130
    body = [
        f'<image href="data:image/png;base64,{image}" x="120" y="0" width="{width}" height="{len(rows) * cell}" '
        'preserveAspectRatio="none" class="pixels"/>'
    ]
    label_step = max(1, math.ceil(len(rows) / max(1, len(rows) * cell // 12)))
    for index in range(0, len(rows), label_step):
        body.append(_write_text("tick", 114, max(index * cell + cell / 2 + 3.5, 8), rows[index][:18], "end"))
    for tick in choose_ticks(steps[0], steps[-1], 8) if len(steps) > 1 else []:
        x = 120 + (tick - steps[0]) / (steps[-1] - steps[0]) * width
        body.append(_write_text("tick", x, height - 10, format_tick(tick), "middle"))
    return _wrap_svg(title, WIDTH, height, body)


def colour_ratios(values: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Map ratios to colours: blue below 1, white at 1, red from 1.5 on; grey where nothing was measured."""
    ratio = np.nan_to_num(values, nan=1.0)
    heat = np.clip((ratio - 1) / 0.5, -1, 1)
    pixels = np.full((*values.shape, 3), 255.0)
    hot, cold = np.clip(heat, 0, 1), np.clip(-heat, 0, 1)
    pixels[..., 0] -= 45 * hot + 205 * cold
    pixels[..., 1] -= 215 * hot + 135 * cold
    pixels[..., 2] -= 215 * hot + 45 * cold
    pixels[~np.isfinite(values)] = 170
    return pixels.astype(np.uint8)


def encode_png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Encode an image (height, width, 3) as PNG, for which the standard library is enough: numpy has no image files."""
    height, width, _ = pixels.shape
    # Each row begins with the number of its filter; 0: none.
    rows = b"".join(b"\0" + pixels[row].tobytes() for row in range(height))

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits for each of red, green and blue (type 2)
    return (
        b"\x89PNG\r\n\x1a\n"
        + make_chunk(b"IHDR", head)
        + make_chunk(b"IDAT", zlib.compress(rows, 9))
        + make_chunk(b"IEND", b"")
    )


def draw_gantt(title: str, spans: Sequence[Span], rows: int, seconds: float) -> str:
    """Draw what each rank of a pipeline computed when. seconds: length of the time axis."""
    if not spans or seconds <= 0:
        return ""
    row, label_width = 18, 60
    scale = (WIDTH - label_width - _RIGHT) / seconds
    body = [f'<text class="tick" x="0" y="{index * row + 13}">pp {index}</text>' for index in range(rows)]
    for span in spans:
        x, width = label_width + span.start * scale, max((span.end - span.start) * scale, 0.3)
        body.append(
            f'<rect class="span {escape(span.kind)}" x="{x:.1f}" y="{span.row * row + 2}" width="{width:.1f}" '
            f'height="{row - 4}"><title>{escape(span.text)}</title></rect>'
        )
    return _wrap_svg(title, WIDTH, rows * row + 4, body)


def draw_points(title: str, points: Sequence[tuple[float, float, str, bool]], x_label: str, y_label: str) -> str:
    """Draw points (x, y, text, whether it is the best)."""
    if not points:
        return ""
    xs, ys, height = [point[0] for point in points], [point[1] for point in points], 240
    axes = _Axes((min(xs), max(xs)), (min(ys), max(ys)), WIDTH, height, spans_decades(ys))
    body = axes.draw_frame(x_label, y_label)
    for x, y, text, best in points:
        kind = "best" if best else ""
        body.append(
            f'<circle class="{kind}" cx="{axes.place_x(x):.1f}" cy="{axes.place_y(y):.1f}" r="{6 if best else 4}">'
        )
        body.append(f"<title>{escape(text)}</title></circle>")
    return _wrap_svg(title, WIDTH, height, body)


def draw_parallel(title: str, axes: Sequence[tuple[str, Sequence[object]]], best: int | None) -> str:
    """Draw parallel coordinates: an axis for each (name, value of each point), a line for each point.

    Numbers are placed by value, by its logarithm where they span decades; words side by side. best: a point to stress.
    """
    if len(axes) < 2 or not axes[0][1]:
        return ""
    height, top, bottom = 230, 26, 18
    places = []
    body = []
    for index, (name, values) in enumerate(axes):
        x = 60 + index * (WIDTH - 120) / (len(axes) - 1)
        ticks, y_of = _place_values(values, top, height - bottom)
        places.append((x, y_of))
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>')
        body.append(_write_text("label", x, 12, name.rpartition(".")[2][:22], "middle"))
        body += [_write_text("tick halo", x + 5, y + 3.5, text) for y, text in _thin_ticks(ticks)]
    ways = []
    for point in range(len(axes[0][1])):
        path = "M" + "L".join(f"{x:.1f} {y_of[point]:.1f}" for x, y_of in places)
        ways.append(f'<path class="way{" best" if point == best else ""}" d="{path}"/>')
    ways.sort(key=lambda way: "best" in way)  # what is drawn last is on top, and the labels on top of all
    return _wrap_svg(title, WIDTH, height, [*ways, *body])


def _thin_ticks(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leave out ticks whose labels would lie on another one's; the outermost stay."""
    if len(ticks) < 3:
        return list(ticks)
    first, *middle, last = sorted(ticks)
    kept_ticks = [first]
    for tick in middle:
        if min(tick[0] - kept_ticks[-1][0], last[0] - tick[0]) >= _LEAST_GAP:
            kept_ticks.append(tick)
    return [*kept_ticks, last]


def _place_values(values: Sequence[object], top: float, bottom: float) -> tuple[list[tuple[float, str]], list[float]]:
    """Return (y, label) of the ticks of an axis, and the y of each value; a missing value is placed below the axis."""
    numbers = [float(value) for value in values if is_number(value)]  # type: ignore[arg-type]
    if len(numbers) == sum(value is not None for value in values) and numbers:
        scale = math.log if spans_decades(numbers) else float
        low, high = _widen(scale(min(numbers)), scale(max(numbers)))

        def place(value: object) -> float:
            return bottom - (scale(float(value)) - low) / (high - low) * (bottom - top)  # type: ignore[arg-type]

        ticks = sorted(set(numbers)) if len(set(numbers)) <= 6 else [min(numbers), max(numbers)]
        return [(place(value), format_tick(value)) for value in ticks], [
            place(value) if is_number(value) else bottom + 12 for value in values
        ]
    words = sorted({str(value) for value in values})
    step = (bottom - top) / max(len(words) - 1, 1)
    position_of = {word: bottom - index * step for index, word in enumerate(words)}
    return [(y, word[:14]) for word, y in position_of.items()], [position_of[str(value)] for value in values]


def _wrap_svg(title: str, width: int, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"{''.join(body)}</svg>"
    )
