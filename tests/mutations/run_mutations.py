"""Seed each fault into a copy of the project and print which test notices it: `python
tests/mutations/run_mutations.py`.

For each fault its own tests run first and, if they pass, all tests of its room, in a copy of the last commit. Only a
test that fails counts; a fault that no longer fits its file, or pytest itself failing, ends the study. A test that
notices a fault is run again without the fault, and has to pass. Options choose faults by a word of their name, and how
many run side by side.
"""

from __future__ import annotations

import argparse
import os
import re
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
_ROOMS = {"models": ("parallel", "models"), "regular_files.py": ("launch", "checkpoint")}
"""Folders of tests of rooms that have none of the same name."""
_SECONDS = 3600
"""After which the tests hang, which ends the study."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault."""

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
    for fault in chosen:
        check_fits(fault, ROOT)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda fault: _try_fault(fault, options.own_tests), chosen))
    print_table(outcomes)
    return int(any(not outcome.noticed_by for outcome in outcomes))


def _try_fault(fault: Fault, own_tests: bool) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        path = check_fits(fault, tree)
        sound = path.read_text()
        path.write_text(sound.replace(fault.old, fault.new))
        noticed = _run_tests(tree, [f"tests/{name}" for name in fault.tests])
        if not noticed and not own_tests:
            noticed = _run_tests(tree, [f"tests/{name}" for name in _ROOMS.get(fault.room, (fault.room,))])
        path.write_text(sound)
        if noticed and (also := _run_tests(tree, [noticed.partition("[")[0]])):
            raise RuntimeError(f"{fault.name}: {also} fails without the fault, too")
    outcome = Outcome(fault, noticed, time.monotonic() - began)
    print(f"{outcome.seconds:6.0f} s  {fault.name}: {noticed or 'NOT NOTICED'}", flush=True)
    return outcome


def check_fits(fault: Fault, tree: Path) -> Path:
    """Return the file of a fault in a checkout. Raises ValueError unless its text is there once, and its tests are."""
    path = tree / "hpc_train" / fault.file
    if (count := path.read_text().count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has its text {count} times")
    if missing := [name for name in fault.tests if not (tree / "tests" / name).exists()]:
        raise ValueError(f"{fault.name}: there are no tests {', '.join(missing)}")
    return path


def _run_tests(tree: Path, tests: Sequence[str]) -> str:
    """Return the first test that fails in a tree; empty if all pass. Raises RuntimeError if pytest itself fails."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "--tb=no"]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == 0:
        return ""
    found = _FAILED.search(done.stdout)
    if done.returncode != 1 or found is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout.strip()[-500:]}")
    return found[1]


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
