"""Find what a test leaves behind: threads, child processes, files in the checkout, environment variables.

Leftovers make other tests fail, far from the cause: a fork copies a lock that a forgotten thread holds, a forgotten
process occupies a port or a core, and a variable changes what the next test composes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 5.0
"""What is on its way out when a test returns gets this long: the kernel takes its time to end a killed process."""

ALLOWED_THREADS = {
    "pytest_timeout": "the timer of pytest-timeout where it cannot use a signal",
    "run_server": "of pytest-rerunfailures, in a run without pytest-xdist",
    "tqdm_monitor": "tqdm's watcher, which is started once by the first bar that transformers shows",
}
ALLOWED_PROCESSES = {
    "multiprocessing.resource_tracker": "Python's own; started once and ended with this process",
    "multiprocessing.forkserver": "Python's own; started once and ended with this process",
}
ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest's own; it names the phase of the test",
    "CUBLAS_WORKSPACE_CONFIG": "set by a deterministic run, as torch demands it before the first product on a GPU",
    "KMP_DUPLICATE_LIB_OK": "set by scikit-learn when it is imported",
    "KMP_INIT_AT_FORK": "set by scikit-learn when it is imported",
    "TORCHINDUCTOR_CACHE_DIR": "set by torch when it first compiles",
    "TRITON_CACHE_DIR": "set by torch when it first compiles",
}
ALLOWED_FILES = {
    "__pycache__": "Python's own",
    ".pytest_cache": "pytest's own",
    ".hypothesis": "hypothesis' own",
    ".mypy_cache": "of a type check beside the tests",
    ".ruff_cache": "of a format check beside the tests",
}
_NOT_SEARCHED = {".git", ".venv", "build", "dist", *ALLOWED_FILES}


@dataclass(frozen=True)
class Surroundings:
    """The state of this process that tests share."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    variables: dict[str, str]
    files: dict[str, int]
    """Time of the last change of each folder of the checkout."""
    folder: str


_threads_at_forks: list[str] = []
_reported: set[threading.Thread] = set()
"""Left by a test that has failed of it; those after it do not fail of it again."""


def note_fork() -> None:
    """Record the threads beside a fork: a lock that one of them holds is never released in the child.

    execnet's receiver, which each pytest-xdist worker has, is no `threading.Thread` and takes no lock of ours.
    """
    if others := _other_threads() - _reported:
        _threads_at_forks.append(", ".join(sorted(thread.name for thread in others)))


def record_surroundings() -> Surroundings:
    _threads_at_forks.clear()
    return Surroundings(_other_threads(), _children(), dict(os.environ), _folder_times(), _working_directory())


def list_leftovers(before: Surroundings, may_fork: bool = False) -> list[str]:
    """Describe each difference to `before`, after waiting for threads and processes to end.

    may_fork: a fork beside threads is no fault of this test.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while (running := _running(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    _reported.update(_other_threads() - before.threads)
    variables = {name: os.environ.get(name) for name in before.variables.keys() | os.environ.keys()}
    changed = {name for name, value in variables.items() if value != before.variables.get(name)}
    found = [
        *running,
        *(f"forked beside the threads {names}" for names in sorted(set(_threads_at_forks)) if not may_fork),
        *(f"environment variable {name}={variables[name]}" for name in sorted(changed - ALLOWED_VARIABLES.keys())),
        *(f"file {path}, of this test or of one in another worker" for path in _new_files(before)),
    ]
    if _working_directory() != before.folder:
        found.append(f"working directory {_working_directory()}")
        os.chdir(before.folder)
    return found


def _running(before: Surroundings) -> list[str]:
    threads = [f"thread {thread.name}" for thread in _other_threads() - before.threads]
    return [*threads, *(f"process {process}" for process in _new_processes(before))]


def _other_threads() -> frozenset[threading.Thread]:
    # A _DummyThread stands for a thread that Python did not start: execnet's, or one of a library in C.
    dummies = threading._DummyThread  # type: ignore[attr-defined]
    return frozenset(
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and not isinstance(thread, dummies)
        and not any(name in thread.name for name in ALLOWED_THREADS)
    )


def _children() -> frozenset[int]:
    """Return the processes that this one has started and has not waited for."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    found: set[int] = set()
    for task in tasks.iterdir():
        try:
            found |= {int(child) for child in (task / "children").read_text().split()}
        except OSError:  # a thread that has just ended
            continue
    return frozenset(found)


def _new_processes(before: Surroundings) -> list[str]:
    if not _children() - before.processes:
        return []
    multiprocessing.active_children()  # waits for those that have ended
    found = []
    for child in sorted(_children() - before.processes):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if not any(name in command for name in ALLOWED_PROCESSES):
            found.append(f"{child}: {command[:200].strip() or 'ended, and nobody waited for it'}")
    return found


@cache
def _folders() -> list[str]:
    found = []
    for folder, subfolders, _ in os.walk(CHECKOUT):
        subfolders[:] = [name for name in subfolders if name not in _NOT_SEARCHED and not name.endswith(".egg-info")]
        found.append(folder)
    return found


_names: dict[str, frozenset[str]] = {}


def _folder_times() -> dict[str, int]:
    """Return the modification times of folders, which change with their entries and are quicker to read than these."""
    times = {}
    for folder in _folders():  # twice a test, so without a Path, which takes ten times as long
        with contextlib.suppress(FileNotFoundError):
            times[folder] = os.stat(folder).st_mtime_ns  # noqa: PTH116
    for folder in times:
        if folder not in _names:
            _names[folder] = _list_names(folder)
    return times


def _new_files(before: Surroundings) -> list[str]:
    found = []
    for folder, changed in _folder_times().items():
        if changed == before.files.get(folder):
            continue
        names = _list_names(folder)
        found += [str(Path(folder, name)) for name in sorted(names - _names[folder]) if name not in ALLOWED_FILES]
        _names[folder] = names
    return found


def _list_names(folder: str) -> frozenset[str]:
    return frozenset(entry.name for entry in Path(folder).iterdir())


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(removed)"
