"""`hpc-train checkpoint verify`: is what was committed still there, bit for bit?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.catalogue import committed, found, locate
from hpc_train.checkpoint.commands.show import plain, print_json, progress, size
from hpc_train.checkpoint.commands.target import newest, target
from hpc_train.checkpoint.errors import CheckpointError, Problem
from hpc_train.checkpoint.manifest import Manifest, read
from hpc_train.checkpoint.verification import verify_alone
from hpc_train.errors import UserError

_MOST_JOBS = 8


@dataclass(frozen=True)
class Verdict:
    """Of one step."""

    step: int
    tensors: int
    bytes: int
    problems: list[Problem]

    def to_json(self) -> dict[str, Any]:
        """The contract of `verify --json`."""
        problems = [asdict(problem) for problem in self.problems]
        return {
            "step": self.step,
            "ok": not problems,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "problems": problems,
        }


def verify(where: str, step: int | None, every: bool, jobs: int | None, json: bool) -> int:
    """Print what is wrong; returns 1 if anything is, else 0."""
    place = target(where)
    if place.step is not None and (every or step not in (None, place.step)):
        raise UserError(f"{where}: is one step already; --step and --all are for a directory of several")
    if step is not None:
        locate(place.directory, step)
    step = place.step if step is None else step
    chosen = committed(place.directory) if every else [newest(place) if step is None else step]
    verdicts = [_verdict(place.directory, it, jobs or min(os.cpu_count() or 1, _MOST_JOBS), json) for it in chosen]
    if json:
        answers = [verdict.to_json() for verdict in verdicts]
        print_json(answers if every else answers[0])
    return int(any(verdict.problems for verdict in verdicts))


def check(path: Path, step: int, jobs: int, tell: Callable[[int], object]) -> Verdict:
    """Everything of one step: manifest, index, all bytes, and that the files cover each tensor exactly once."""
    manifest, problems = verify_alone(path, step, jobs, tell)
    if manifest is None:
        return Verdict(step, 0, 0, problems)
    return Verdict(step, len(manifest.holdings.names), manifest.size, problems)


def _verdict(directory: Path, step: int, jobs: int, quiet: bool) -> Verdict:
    path = found(directory)[step]
    with progress(f"step {step}", _size(path, step), quiet) as tell:
        verdict = check(path, step, jobs, tell)
    if not quiet:
        _print(path, verdict)
    return verdict


def _size(path: Path, step: int) -> int:
    try:
        manifest: Manifest = read(path, step)
    except CheckpointError:
        return 0
    return manifest.size


def _print(path: Path, verdict: Verdict) -> None:
    if not verdict.problems:
        print(f"{plain(str(path))}: sound: {verdict.tensors:,} tensors, {size(verdict.bytes)}")
    for problem in verdict.problems:
        print(plain(f"{path}: damaged: {problem}"), file=sys.stderr)
