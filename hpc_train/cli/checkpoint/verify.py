"""`hpc-train checkpoint verify`: compare all bytes of a step with its checksums."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.errors import CheckpointError, Problem
from hpc_train.checkpoint.format.manifest import Manifest, read_manifest
from hpc_train.checkpoint.load.verify import verify_in_one_process
from hpc_train.checkpoint.storage.step_directory import find_steps, list_committed_steps, locate_step
from hpc_train.checkpoint.storage.step_selection import find_newest_step, find_target
from hpc_train.cli.output import print_json, progress_bar
from hpc_train.errors import UserError
from hpc_train.terminal import one_line
from hpc_train.units import format_bytes

_MAX_THREADS = 8


@dataclass(frozen=True)
class VerifyResult:
    """Problems found in one step."""

    step: int
    tensors: int
    bytes: int
    problems: list[Problem]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `verify --json`."""
        problems = [asdict(problem) for problem in self.problems]
        return {
            "step": self.step,
            "ok": not problems,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "problems": problems,
        }


def verify_command(where: str, step: int | None, every: bool, jobs: int | None, json: bool) -> int:
    """Verify the chosen steps and print their problems; returns 1 if there are any, else 0."""
    place = find_target(where)
    if place.step is not None and (every or step not in (None, place.step)):
        raise UserError(f"{where}: is one step already; --step and --all are for a directory of several")
    if step is not None:
        locate_step(place.directory, step)
    step = place.step if step is None else step
    steps = list_committed_steps(place.directory) if every else [find_newest_step(place) if step is None else step]
    results = [
        _verify_step(place.directory, step, jobs or min(os.cpu_count() or 1, _MAX_THREADS), json) for step in steps
    ]
    if json:
        answers = [result.to_json() for result in results]
        print_json(answers if every else answers[0])
    return int(any(result.problems for result in results))


def verify_one_step(path: Path, step: int, jobs: int, on_bytes: Callable[[int], object]) -> VerifyResult:
    """Verify one step: manifest, index, all bytes, and that the files cover each tensor exactly once."""
    manifest, problems = verify_in_one_process(path, step, jobs, on_bytes)
    if manifest is None:
        return VerifyResult(step, 0, 0, problems)
    return VerifyResult(step, len(manifest.step_layout.names), manifest.size, problems)


def _verify_step(directory: Path, step: int, jobs: int, quiet: bool) -> VerifyResult:
    path = find_steps(directory)[step]
    with progress_bar(f"step {step}", _read_manifest_bytes(path, step), quiet) as on_bytes:
        result = verify_one_step(path, step, jobs, on_bytes)
    if not quiet:
        _print_result(path, result)
    return result


def _read_manifest_bytes(path: Path, step: int) -> int:
    try:
        manifest: Manifest = read_manifest(path, step)
    except CheckpointError:
        return 0
    return manifest.size


def _print_result(path: Path, result: VerifyResult) -> None:
    if not result.problems:
        print(f"{one_line(str(path))}: sound: {result.tensors:,} tensors, {format_bytes(result.bytes)}")
    for problem in result.problems:
        print(one_line(f"{path}: damaged: {problem}"), file=sys.stderr)
