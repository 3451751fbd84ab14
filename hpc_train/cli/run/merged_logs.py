"""`hpc-train logs RUN --merge`: print the lines of all ranks in the order of their times, the first error first."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from hpc_train.cli.run.logs import LogSelection, choose_attempt
from hpc_train.errors import UserError
from hpc_train.launch.recovery.failures import find_first_error
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.attempts import RESULT_MARKER, rank_of_task
from hpc_train.launch.state.merged_lines import AttemptLogs, FoldedLine, LineFilter, find_attempt_logs, merge_lines
from hpc_train.launch.state.run_lookup import find_points, require_single
from hpc_train.terminal import escape_controls, one_line
from hpc_train.training.records.warning_files import read_warnings
from hpc_train.units import format_ranges, format_seconds

_MAX_RANGES = 8
"""Ranges of ranks that a line lists."""


def merged_logs_command(run: str, choice: LogSelection, lines: LineFilter, as_json: bool) -> int:
    """Print the merged lines of an attempt, and return the exit code. Raises UserError if there are none (yet)."""
    point = require_single(find_points(run, run_client), run)
    attempt = choose_attempt(point.run, choice)
    folder = point.run / "logs" / str(attempt)
    logs = _find_logs(folder, attempt, lines)
    folded: Iterable[FoldedLine] = merge_lines(logs, lines)
    if choice.tail is not None:
        folded = deque(folded, choice.tail)
    if as_json:
        _print_json(folded)
        return 0
    print("\n".join(_describe(folder, attempt, logs)))
    layout = _Layout(logs, lines)
    for line in folded:
        sys.stdout.write(layout.format(line))
    sys.stdout.flush()
    return 0


def _find_logs(folder: Path, attempt: int, lines: LineFilter) -> AttemptLogs:
    """Find the logs. Raises UserError if there are none of the chosen ranks."""
    try:
        logs = find_attempt_logs(folder)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; it holds no logs that can be read") from error
    if not logs.ranks:
        raise UserError(f"{folder}: no rank has printed anything (yet)")
    if not any(lines.takes_rank(rank.rank) for rank in logs.ranks):
        raise UserError(f"--rank: attempt {attempt} has logs of {_name_ranks([r.rank for r in logs.ranks])}")
    return logs


def _print_json(lines: Iterable[FoldedLine]) -> None:
    for folded in lines:
        line = folded.line
        rounded_time = round(line.time, 6) if line.measured else None
        fields = {"time": rounded_time, "ranks": sorted(folded.ranks), "level": line.level, "step": line.step}
        print(json.dumps({**fields, "message": line.message}))


def _describe(folder: Path, attempt: int, logs: AttemptLogs) -> Iterator[str]:
    """Yield the lines above the log: the first error, and what a reader must know about the order."""
    yield _describe_first_error(folder)
    state = "" if (folder / RESULT_MARKER).exists() else ", still running or ended without a word"
    yield f"attempt {attempt}{state}: {_count(len(logs.ranks), 'rank')}; {_describe_times(logs)}"
    if logs.missing:
        yield f"no log of {_name_ranks(logs.missing)}"
    yield ""


def _describe_times(logs: AttemptLogs) -> str:
    if not logs.has_times:
        return "this run wrote no times: lines are in the order of their numbers"
    missing = f"; no times from {_name_ranks(logs.without_times)}" if logs.without_times else ""
    largest = logs.largest_offset
    if largest is None:
        return f"in the order of each node's own clock{missing}"
    return f"clocks corrected by at most {format_seconds(largest)}{missing}"


def _describe_first_error(folder: Path) -> str:
    """Describe why the first rank failed; if none did, the first error that a rank logged."""
    error = find_first_error(folder)
    if error is not None:
        return f"first error: rank {rank_of_task(folder, error.task)}: {one_line(error.line)}"
    logged = next((warning for warning in read_warnings(folder) if warning.level == "error"), None)
    if logged is not None:
        return f"first error: rank {rank_of_task(folder, logged.process)} logged: {one_line(logged.text)}"
    return "first error: none"


class _Layout:
    """The columns of the merged log: time, rank, step, level and text."""

    def __init__(self, logs: AttemptLogs, choice: LineFilter) -> None:
        ranks = [rank.rank for rank in logs.ranks if choice.takes_rank(rank.rank)]
        self._all, self._width = len(ranks), max(len(f"x {len(ranks)} ranks"), len(f"rank {max(ranks)}"))

    def format(self, folded: FoldedLine) -> str:
        """Format one line; control characters are escaped, so that it stays one line."""
        line, number = folded.line, len(folded.ranks)
        clock = datetime.fromtimestamp(line.time).strftime("%H:%M:%S.%f")[:-3] if line.measured else " " * 12
        source = f"x {number} ranks" if number > 1 else f"rank {folded.ranks[0]}"
        which = f"  [{format_ranges(folded.ranks, _MAX_RANGES)}]" if 1 < number < self._all else ""
        step = f"step {line.step}" if line.step is not None else ""
        text = escape_controls(line.message).replace("\n", "\\n")
        return f"{clock}  {source:<{self._width}}  {step:<9}  {line.level:<7}  {text}{which}".rstrip() + "\n"


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks, _MAX_RANGES)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
