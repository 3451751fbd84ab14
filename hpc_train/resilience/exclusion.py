"""Decide which nodes a run leaves out: strikes against nodes in nodes.jsonl of the run directory, and their score.

A node that fell silent, or was slow in a pre-flight, is left out at once; a node on which a rank hung or was killed
after the second time, as that may have been the program. An error that a rank reports about another rank is no
evidence against a node. A strike counts for 24 hours, and only a few nodes are left out at a time, so that a mistake
of the program cannot use up a cluster. Standard library only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_train.regular_files import append_line, parse_json_object, read_text, write_private_file

NODES = "nodes.jsonl"
"""File in a run directory, to which strikes are appended."""
EXCLUDE, REQUEUE_NODES = "exclude", "requeue-nodes"
"""Files in an attempt's log directory: the nodes that a requeue leaves out, and how many it asks for. The batch script
reads them."""
DOUBTFUL = "doubtful-nodes"
"""File in an attempt's log directory: spare nodes that did not answer when other nodes were lost."""
HARDWARE, SOFTWARE = 2, 1
"""Weight of a strike: what only the node can have done, and what the program may have done."""
SCORE_TO_EXCLUDE = 2
LIFE_SECONDS = 24 * 3600.0
"""Time for which a strike counts."""
_LARGEST_SHARE = 0.05
"""Largest share of a run's nodes that is left out at a time."""


@dataclass(frozen=True)
class Strike:
    """One piece of evidence against a node."""

    host: str
    weight: int
    evidence: str
    """Evidence, in one line."""
    attempt: int
    time: float = field(default_factory=time.time)


def append_strike(run: Path, strike: Strike) -> None:
    """Record a strike in the run directory. A full disk is ignored: the caller can still act on the strike."""
    with suppress(OSError):
        append_line(run / NODES, json.dumps(asdict(strike)))


def read_strikes(run: Path) -> list[Strike]:
    """Return the strikes that were recorded, oldest first; lines of another form are passed over."""
    try:
        text = read_text(run / NODES)
    except OSError:
        return []
    return [strike for line in text.splitlines() if (strike := _parse_strike(line)) is not None]


def _parse_strike(line: str) -> Strike | None:
    try:
        value = parse_json_object(line)
        return Strike(
            str(value["host"]),
            int(value["weight"]),
            str(value["evidence"]),
            int(value["attempt"]),
            float(value["time"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def select_valid(strikes: Iterable[Strike], now: float | None = None) -> list[Strike]:
    """Return the strikes that still count. now: seconds since 1970.

    One that was recorded while a clock was ahead by more than LIFE_SECONDS does not: it would count for too long.
    """
    now = time.time() if now is None else now
    return [strike for strike in strikes if abs(now - strike.time) < LIFE_SECONDS]


def choose_excluded(strikes: Iterable[Strike], nodes: int, now: float | None = None) -> list[str]:
    """Return the nodes to leave out, the worst first; of equal ones that with the latest strike.

    strikes: in the order in which they were recorded, which no clock that is set can change. nodes: of the run; at most
    one node in twenty of them, and at least one, is left out. now: seconds since 1970.
    """
    score: dict[str, int] = {}
    latest: dict[str, int] = {}
    for number, strike in enumerate(select_valid(strikes, now)):
        score[strike.host] = score.get(strike.host, 0) + strike.weight
        latest[strike.host] = number
    bad = [host for host, sum_of_weights in score.items() if sum_of_weights >= SCORE_TO_EXCLUDE]
    bad.sort(key=lambda host: (score[host], latest[host]), reverse=True)
    return bad[: max(1, int(_LARGEST_SHARE * nodes))]


def write_requeue(logs: Path, exclude: Iterable[str], nodes: int = 0) -> None:
    """Write what a requeue of the job changes; the batch script changes nothing where the disk is full.

    exclude: nodes that it leaves out. nodes: number of nodes that it asks for, spares included; 0: as many as before.
    """
    with suppress(OSError):
        (logs / EXCLUDE).write_text(",".join(exclude) + "\n")
        if nodes:
            (logs / REQUEUE_NODES).write_text(f"{nodes}\n")


def write_doubtful(logs: Path, hosts: Iterable[str]) -> None:
    """Record spare nodes that may be lost, too: the ranks start there only where there are no others."""
    with suppress(OSError):
        write_private_file(logs / DOUBTFUL, "".join(f"{host}\n" for host in hosts))


def read_doubtful(logs: Path) -> list[str]:
    """Return the spare nodes that may be lost, as an attempt has seen it."""
    try:
        return read_text(logs / DOUBTFUL).split()
    except (OSError, ValueError):
        return []
