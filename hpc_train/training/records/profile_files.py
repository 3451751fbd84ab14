"""Name the trace files of a run, and pass requests of `hpc-train profile RUN` to ranks that are training.

Traces lie in profile/<attempt>/ of the run directory, with the suffix by which TensorBoard's profiler plugin finds
them. A request is profile/request.json, replaced as a whole; ranks look at it from time to time.

Imports neither torch nor omegaconf, because commands that look at runs import it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.config.profile import MAX_STEPS
from hpc_train.regular_files import read_json, write_private_file

FOLDER, REQUEST = "profile", "request.json"
PHASE_PREFIX, MODULE_PREFIX, STEP_PREFIX = "hpc_train: ", "module: ", "ProfilerStep#"
"""What the names of ranges in a trace begin with; the last is torch.profiler's own."""
_TRACE = re.compile(r"rank-(\d+)-steps-(\d+)-(\d+)\.pt\.trace\.json\.gz")


@dataclass(frozen=True)
class TraceFile:
    """A trace of some steps of one rank."""

    path: Path
    attempt: int
    rank: int
    first: int
    last: int


@dataclass(frozen=True)
class ProfileRequest:
    """Which steps of a running job to trace."""

    number: int
    """Nanoseconds since 1970; tells requests apart."""
    first: int
    last: int
    ranks: tuple[int, ...]


def name_trace(rank: int, first: int, last: int) -> str:
    """Return the file name of a trace."""
    return f"rank-{rank}-steps-{first}-{last}.pt.trace.json.gz"


def list_traces(run: Path) -> list[TraceFile]:
    """Return the traces of a run, the latest attempt last."""
    traces = []
    for path in (run / FOLDER).glob("*/*.json.gz"):
        match = _TRACE.fullmatch(path.name)
        if match is not None and path.parent.name.isdecimal():
            rank, first, last = map(int, match.groups())
            traces.append(TraceFile(path, int(path.parent.name), rank, first, last))
    return sorted(traces, key=lambda trace: (trace.attempt, trace.first, trace.last, trace.rank))


def write_request(run: Path, first: int, last: int, ranks: Sequence[int]) -> ProfileRequest:
    """Ask ranks of a running job for a trace; replaces a request that was made before. Raises OSError."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    request = ProfileRequest(time.time_ns(), first, last, tuple(ranks))
    write_private_file(folder / REQUEST, json.dumps(asdict(request)) + "\n")
    return request


def read_request(run: Path) -> ProfileRequest | None:
    """Return the newest request; None if there is none. Raises ValueError or OSError for a damaged one."""
    try:
        fields = read_json(run / FOLDER / REQUEST)
    except FileNotFoundError:
        return None
    numbers = [fields[name] for name in ("number", "first", "last")] if isinstance(fields, dict) else []
    ranks = fields["ranks"] if isinstance(fields, dict) else None
    if not isinstance(ranks, list) or not all(type(value) is int for value in (*numbers, *ranks)):
        raise ValueError("it is not a request of hpc-train profile")
    number, first, last = numbers
    if not 1 <= first <= last < first + MAX_STEPS:
        raise ValueError(f"steps {first} to {last}")
    return ProfileRequest(number, first, last, tuple(ranks))
