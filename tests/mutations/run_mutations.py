"""Seed each fault into a copy of the project and print which test notices: `python tests/mutations/run_mutations.py`.

For each fault its own tests run first and, if they pass, all tests of its room. A fault that no longer fits its file
ends the study. Options choose faults by a word of their name, and how many run side by side.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from seeded_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
_LEFT_OUT = (".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "runs", "site")
_ROOMS = {"models": ("parallel", "models"), "regular_files.py": ("launch", "checkpoint")}
"""Folders of tests of rooms that have none of the same name."""
_SECONDS = 1800
"""After which tests count as hung, and so the fault as noticed."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    fault: Fault
    noticed_by: str
    """The first test that failed; empty if none did."""
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; returns 1 if a fault stays unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults with this text in their name or file")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="faults side by side")
    parser.add_argument("--own-tests", action="store_true", help="do not go on with the tests of the room")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if options.only in fault.name or options.only in fault.file]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda fault: _try_fault(fault, options.own_tests), chosen))
    print_table(outcomes)
    return int(any(not outcome.noticed_by for outcome in outcomes))


def _try_fault(fault: Fault, own_tests: bool) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        apply_fault(fault, tree)
        noticed = _run_tests(tree, [f"tests/{path}" for path in fault.tests])
        if not noticed and not own_tests:
            noticed = _run_tests(tree, [f"tests/{name}" for name in _ROOMS.get(fault.room, (fault.room,))])
    outcome = Outcome(fault, noticed, time.monotonic() - began)
    print(f"{outcome.seconds:6.0f} s  {fault.name}: {noticed or 'NOT NOTICED'}", flush=True)
    return outcome


def apply_fault(fault: Fault, tree: Path) -> None:
    """Put the fault into the copy of the project in `tree`."""
    path = tree / "hpc_train" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.name}: {fault.file} has its text {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new))


def _run_tests(tree: Path, tests: Sequence[str]) -> str:
    """Return the first test that fails in a tree; empty if all pass."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "--tb=no"]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "(the tests hang)"
    if done.returncode == 0:
        return ""
    found = _FAILED.search(done.stdout)
    return found[1] if found else f"(pytest ended with {done.returncode}: {done.stdout.strip()[-200:]})"


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print the faults of each room and how many were noticed, and those that were not."""
    print("\n| room | faults | noticed |\n| --- | --- | --- |")
    for room in dict.fromkeys(outcome.fault.room for outcome in outcomes):
        of_room = [outcome for outcome in outcomes if outcome.fault.room == room]
        print(f"| {room} | {len(of_room)} | {sum(bool(outcome.noticed_by) for outcome in of_room)} |")
    noticed = sum(bool(outcome.noticed_by) for outcome in outcomes)
    print(f"| all | {len(outcomes)} | {noticed} ({noticed / len(outcomes):.0%}) |")
    for outcome in outcomes:
        if not outcome.noticed_by:
            print(f"not noticed: {outcome.fault.name} ({outcome.fault.file})")


if __name__ == "__main__":
    sys.exit(main())
