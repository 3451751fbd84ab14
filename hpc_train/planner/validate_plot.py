"""The scatter plot of `plan validate --plot`: predicted against measured step time, a colour a family."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpc_train.errors import UserError
from hpc_train.planner.validate import Validation


def draw(found: Validation, path: Path) -> None:
    """Raises UserError, one line, without matplotlib, without a run to draw, or for a file that cannot be written."""
    rows = [row for row in found.rows if np.isfinite(row.ratio)]
    if not rows:
        raise UserError("--plot: nothing to draw: no run states a time and can be modelled")
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot: needs matplotlib; pip install 'hpc_train[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), layout="constrained")
    for name, errors in found.families.items():
        points = [(row.run.seconds, row.seconds) for row in rows if row.run.family == name]
        axes.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.7, label=f"{name} ({errors.mape:.1%})")
    ends = np.array([min(row.run.seconds for row in rows) / 1.5, max(row.run.seconds for row in rows) * 1.5])
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color="0.85", zorder=0, label="within 10 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured seconds a step", ylabel="predicted")
    axes.set_title(f"{found.overall.n} runs, mean error {found.overall.mape:.1%}")
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}; give a file .png, .svg or .pdf in a folder that exists") from None
    finally:
        pyplot.close(figure)
