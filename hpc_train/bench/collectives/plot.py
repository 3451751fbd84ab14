"""Bus bandwidth against size, as a picture."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from hpc_train.bench.collectives.result import Measurement, Result
from hpc_train.bench.collectives.table import size_text

_MARKS = {"library": "o", "ring": "s", "tree": "^"}


def write_plot(result: Result, path: Path) -> None:
    """One panel an axis, one line an operation, algorithm and backend; .png or .svg by the name."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(row.axis for row in result.measurements))
    figure = Figure(figsize=(6.5 * len(axes), 5.2), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False, sharey=True)[0]
    for panel, axis in zip(panels, axes, strict=True):
        rows = [row for row in result.measurements if row.axis == axis]
        for name, line in groupby(rows, _line):
            points = list(line)
            mark = _MARKS[points[0].algorithm]
            panel.plot([row.size for row in points], [row.busbw for row in points], marker=mark, label=name)
        sizes = sorted({row.size for row in rows if row.operation == rows[0].operation})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
        panel.set_yscale("log")
        panel.set_title(f"{axis}: {rows[0].groups} x {rows[0].ranks} ranks")
        panel.set_xlabel("size (bytes)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("bus bandwidth (GB/s)")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    figure.suptitle(f"{result.cluster}, {result.ranks} ranks on {result.device}, {result.date[:10]}")
    figure.savefig(path)


def _line(row: Measurement) -> str:
    own = "" if row.algorithm == "library" else f" {row.algorithm} (ours)"
    return f"{row.operation}{own} {row.backend}"
