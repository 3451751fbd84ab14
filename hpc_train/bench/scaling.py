"""`hpc-train bench scaling`: measure the speed-up from more ranks or nodes, and where adding more stops paying off.

Strong scaling keeps the global batch: efficiency is T(1) / (n T(n)). Weak scaling keeps the batch of a rank: efficiency
is T(1) / T(n), and the global batch grows with n. Both are relative to the smallest number in the list. The interval is
that of two standard errors of both medians. Beside them is what the planner predicts for strong scaling, where the
cluster's GPUs are known, and what published runs reach.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.compose import compose
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.report.tuning.trials import Trial, measure_locally, measure_on_slurm

FIELD = ((4, "0.90-0.95 on 2 to 4 GPUs"), (8, "0.85-0.90 on 8"), (math.inf, "0.70-0.85 across nodes"))
"""What published data-parallel runs reach, by number of GPUs."""
_PAYS = 0.5
"""More ranks pay off as long as they gain at least this share of the ideal speed-up."""


@dataclass(frozen=True)
class Efficiency:
    """An efficiency with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingPoint:
    """Measurements at one size."""

    size: int
    """Ranks, or nodes."""
    strong_seconds: float
    weak_seconds: float
    strong: Efficiency
    weak: Efficiency
    planned: float | None
    """Strong efficiency that the planner predicts; None where it cannot."""
    verdict: str
    """The class of the strong run's bottleneck, as its report names it."""


def run_scaling_command(
    overrides: Sequence[str], sizes: str, steps: int, folder: Path, as_json: bool, plot: str | None
) -> int:
    """Measure all sizes, and print a table or JSON; returns the exit code.

    sizes: such as ranks=1,2,4 or nodes=1,2,4,8. Raises UserError for anything else, and for a size that does not run.
    """
    kind, numbers = parse_sizes(sizes)
    config = compose(overrides)
    on_slurm = config.launch.kind == "slurm"
    if on_slurm != (kind == "nodes"):
        raise UserError(
            f"{sizes}: {'give nodes=...' if on_slurm else 'give ranks=..., or launch=slurm with nodes=...'}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--folder {folder}: is not empty; give another one")
    folder.mkdir(parents=True, exist_ok=True)
    measure = (measure_on_slurm if on_slurm else measure_locally)(overrides, folder.absolute(), steps)
    points = measure_scaling(overrides, kind, numbers, measure)
    if plot is not None:
        plot_scaling(points, kind, Path(plot))
    if as_json:
        print(json.dumps({"kind": kind, "points": [asdict(point) for point in points], "pays_up_to": find_end(points)}))
    else:
        print_scaling(points, kind)
    return EXIT_DONE


def parse_sizes(text: str) -> tuple[str, list[int]]:
    """Parse ranks=1,2,4 or nodes=1,2,4. Raises UserError."""
    kind, _, values = text.partition("=")
    numbers = values.split(",")
    if kind not in ("ranks", "nodes") or not all(
        number.isdecimal() and 0 < int(number) <= 1 << 20 for number in numbers
    ):
        raise UserError(f"{text}: give numbers of ranks or nodes, such as ranks=1,2,4 or nodes=1,2,4,8")
    if len(set(numbers)) < 2:
        raise UserError(f"{text}: give at least two numbers")
    return kind, sorted({int(number) for number in numbers})


def measure_scaling(
    overrides: Sequence[str], kind: str, sizes: Sequence[int], measure: Callable[[Mapping[str, str]], Trial]
) -> list[ScalingPoint]:
    """Measure each size twice: with the same global batch, and with one that grows."""
    key = "launch.ranks" if kind == "ranks" else "cluster.nodes"
    batch = compose(overrides).train.global_batch
    trials = {}
    for size in sizes:
        strong = _require(measure({key: str(size)}))
        weak = strong
        if size != sizes[0]:
            weak = _require(measure({key: str(size), "train.global_batch": str(batch * size // sizes[0])}))
        trials[size] = strong, weak
    first = trials[sizes[0]][0]
    planned = {size: predict_seconds([*overrides, f"{key}={size}"]) for size in sizes}
    base = planned[sizes[0]]
    points = []
    for size, (strong, weak) in trials.items():
        # Relative to the smallest size, which need not be 1: a large model may not fit on one GPU.
        times, planned_seconds = size / sizes[0], planned[size]
        points.append(
            ScalingPoint(
                size=size,
                strong_seconds=strong.seconds,
                weak_seconds=weak.seconds,
                strong=compute_efficiency(first, strong, times),
                weak=compute_efficiency(first, weak, 1.0),
                planned=base / (times * planned_seconds) if base is not None and planned_seconds else None,
                verdict=strong.verdict,
            )
        )
    return points


def _require(trial: Trial) -> Trial:
    if trial.failure:
        raise UserError(f"{' '.join(trial.overrides)}: {trial.failure}")
    return trial


def compute_efficiency(first: Trial, other: Trial, times: float) -> Efficiency:
    """Return T(first) / (times T(other)), with the interval of two standard errors of both."""
    value = first.seconds / (times * other.seconds)
    # Errors of a quotient: relative errors add in squares. The first size compared with itself has none.
    error = 2 * math.hypot(first.noise / first.seconds, other.noise / other.seconds) if first is not other else 0.0
    return Efficiency(value, value * (1 - error), value * (1 + error))


def predict_seconds(overrides: Sequence[str]) -> float | None:
    """Return the planner's median step of the best layout; None where it cannot plan, as without a known GPU."""
    from hpc_train.planner.output.plan_json import plan_to_json
    from hpc_train.planner.plan import plan_overrides

    try:
        planned: dict[str, Any] = plan_to_json(plan_overrides(overrides))
        return float(planned["best"]["step_seconds"]["p50"])
    except (UserError, KeyError, TypeError):
        return None


def find_end(points: Sequence[ScalingPoint]) -> int:
    """Return the largest size up to which each increase gained at least half of the ideal strong-scaling speed-up."""
    end = points[0]
    for point in points[1:]:
        gained = end.strong_seconds / point.strong_seconds - 1
        if gained < _PAYS * (point.size / end.size - 1):
            break
        end = point
    return end.size


def print_scaling(points: Sequence[ScalingPoint], kind: str) -> None:
    """Print a table, and the size beyond which adding more does not pay off."""
    from rich.console import Console
    from rich.table import Table

    from hpc_train.units import format_seconds

    def show(efficiency: Efficiency) -> str:
        return f"{efficiency.value:.2f} ({efficiency.low:.2f}-{efficiency.high:.2f})"

    rows = [
        (
            point.size,
            format_seconds(point.strong_seconds),
            show(point.strong),
            show(point.weak),
            "-" if point.planned is None else f"{point.planned:.2f}",
            point.verdict,
        )
        for point in points
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (kind, "step", "strong efficiency", "weak efficiency", "planned", "held back by"):
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    console.print(table)
    console.print(f"more {kind} pay up to {find_end(points)}; published: {'; '.join(text for _, text in FIELD)}")


def plot_scaling(points: Sequence[ScalingPoint], kind: str, path: Path) -> None:
    """Plot both efficiencies with their intervals. Raises UserError without matplotlib, or if writing fails."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--plot {path}: needs matplotlib; pip install 'hpc_train[plot]'") from None
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    sizes = [point.size for point in points]
    for name, efficiencies in (("strong", [p.strong for p in points]), ("weak", [p.weak for p in points])):
        errors = [[e.value - e.low for e in efficiencies], [e.high - e.value for e in efficiencies]]
        axes.errorbar(sizes, [e.value for e in efficiencies], yerr=errors, marker="o", capsize=3, label=name)
    if planned := [(point.size, point.planned) for point in points if point.planned is not None]:
        axes.plot(*zip(*planned, strict=True), linestyle="--", label="strong, planned")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(kind)
    axes.set_ylabel("efficiency")
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error
