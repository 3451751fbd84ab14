"""Compare two runs: which part of a step changed, by how much, and what each loss cost.

A page and a JSON file beside each other, as page.py writes for one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.report.efficiency import LOSSES, StepLosses
from hpc_train.report.pages import charts
from hpc_train.report.run_summary import RunSummary
from hpc_train.report.step_table import StepTable
from hpc_train.units import format_seconds


@dataclass(frozen=True)
class Difference:
    """How one part of a step moved from the first run to the second."""

    name: str
    """useful, or a name of LOSSES."""
    before: float
    """Seconds a step."""
    after: float

    @property
    def moved(self) -> float:
        """Seconds a step that it takes longer in the second run."""
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    before: RunSummary
    after: RunSummary
    parts: tuple[Difference, ...]
    """Parts of a step, the one that moved most first; they add up to the step. Empty if either was not measured."""
    noise: float
    """Seconds: half the width of the 95 % interval of the difference of the mean steps."""

    @property
    def moved(self) -> float:
        """Seconds a step that the second run takes longer."""
        return sum(part.moved for part in self.parts)

    @property
    def line(self) -> str:
        """Return what moved in one line."""
        if not self.parts:
            return "the parts of a step were not measured in both runs"
        before = sum(part.before for part in self.parts)
        if abs(self.moved) <= self.noise:
            return f"no difference beyond the noise of {format_seconds(self.noise)} per step"
        first = self.parts[0]
        word = "longer" if self.moved > 0 else "less"
        change = f"a step takes {abs(self.moved) / before:.0%} {word} ({format_seconds(abs(self.moved))})"
        return f"{change}; most of it is {first.name.replace('_', ' ')}, {_format_signed(first.moved)}"

    def as_json(self) -> dict[str, Any]:
        """Return what `report A B --json` prints."""
        return {
            "runs": [str(self.before.path), str(self.after.path)],
            "verdicts": [run.verdict.as_json(str(run.status.state)) for run in (self.before, self.after)],
            "line": self.line,
            "moved_seconds": round(self.moved, 6),
            "noise_seconds": round(self.noise, 6),
            "parts": [
                {"name": part.name, "before": round(part.before, 6), "after": round(part.after, 6)}
                for part in self.parts
            ],
            "settings": [{"key": key, "before": one, "after": other} for key, one, other in self.settings],
        }

    @property
    def settings(self) -> list[tuple[str, Any, Any]]:
        """Return the settings in which the runs differ."""
        from hpc_train.config.plain_config import config_to_dict, flatten_settings

        if self.before.config is None or self.after.config is None:
            return []
        one, other = (
            flatten_settings(config_to_dict(run.config)) for run in (self.before, self.after) if run.config is not None
        )
        return [
            (key, one.get(key), other.get(key))
            for key in dict.fromkeys([*one, *other])
            if one.get(key) != other.get(key) and key != "run_dir"
        ]


def compare_runs(before: RunSummary, after: RunSummary) -> Comparison:
    """Compare two runs by the parts of their mean steps."""
    if before.losses is None or after.losses is None:
        return Comparison(before, after, (), 0.0)
    parts_before, parts_after = _list_parts(before.losses), _list_parts(after.losses)
    parts = [Difference(name, parts_before[name], parts_after[name]) for name in parts_before]
    total = sum(part.moved for part in parts)
    # First what moved in the direction in which the whole moved.
    parts.sort(key=lambda part: -part.moved if total > 0 else part.moved)
    noise = 1.96 * float(np.hypot(_estimate_standard_error(before.table), _estimate_standard_error(after.table)))
    return Comparison(before, after, tuple(parts), noise)


def _list_parts(losses: StepLosses) -> dict[str, float]:
    return {"useful": losses.useful, **{name: losses.losses[name] for name in LOSSES}}


def _estimate_standard_error(table: StepTable | None) -> float:
    """Return the standard error of the mean step, in seconds, from means of ten neighbouring groups of steps."""
    if table is None:
        return 0.0
    steps = np.nanmean(table["total"] - np.nan_to_num(table["evaluate"]), axis=0)
    # Neighbouring steps are alike, so single steps would make the
    # error look too small; means of groups are nearly independent.
    groups = [float(np.nanmean(group)) for group in np.array_split(steps, min(10, len(steps))) if len(group)]
    return float(np.std(groups, ddof=1) / np.sqrt(len(groups))) if len(groups) > 1 else 0.0


def _format_signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write comparison.html and comparison.json; returns the page's path. Raises UserError if that fails."""
    from hpc_train.report.pages.page import mark_safe, render_template, write_pages
    from hpc_train.report.pages.run_charts import pick

    runs = (comparison.before, comparison.after)
    longest = max((run.losses.total for run in runs if run.losses is not None), default=0.0)
    bars = []
    for run in runs:
        if run.losses is not None:
            kinds = [
                (f"p-{name}", name.replace("_", " "), seconds) for name, seconds in _list_parts(run.losses).items()
            ]
            # An empty part fills the shorter bar, so that both have one scale.
            bars.append((run.name, [*kinds, ("p-none", "", longest - run.losses.total)]))
    curves = charts.draw_lines(
        "loss", [charts.Series(run.name, *pick(run.steps, "loss")) for run in runs], width=charts.WIDTH
    )
    page = render_template(
        "comparison.html",
        comparison=comparison,
        chart=mark_safe(charts.draw_stacks("steps", bars)),
        curves=mark_safe(curves),
    )
    return write_pages(folder, "comparison", page, comparison.as_json())
