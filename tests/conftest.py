"""Shared by all tests: one thread per process, so that forked ranks neither deadlock nor compete for two cores."""

import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import false_alarms
import leftovers
import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from base_configs import compose_from_base
from hypothesis import settings

from hpc_train.config import compose
from hpc_train.testing import DEVICE_VARIABLE, start_gpu_server

torch.set_num_threads(1)

# An example may take as long as a busy machine makes it take.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Here and not in a fixture: many cases are composed while tests are collected.
compose.hydra_compose = compose_from_base

if os.environ.get(DEVICE_VARIABLE) == "cuda":
    start_gpu_server()  # before the first test, which would otherwise leave a process behind

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.register_at_fork(before=leftovers.note_fork)

SLURM = "tests/slurm/"
ROOMS = ("planner", "hydra_launchers", "checkpoint", "bench", "parallel", "launch", "runtime", "training")
SECOND_CLUSTER = ("tests/slurm/test_campaign.py", "tests/slurm/test_faults_of_jobs.py")
"""They wait for minutes, on a cluster of their own, and need not wait for the other tests of Slurm."""
FIRST = (SLURM, *(f"tests/{room}/" for room in ROOMS))
"""Slurm's are the longest row and mostly wait. Beside them run rooms of one process a test; those whose ranks want all
cores come when that row has ended."""


class FileByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A worker takes one file at a time; the tests that share a Slurm cluster are taken together."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SECOND_CLUSTER):
            return "the second cluster"
        return SLURM if nodeid.startswith(SLURM) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileByFile:
    return FileByFile(config, log)


class FailuresAsTheyCome:
    """Reports each failure at once, for a run that may be stopped before its summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome in ("failed", "rerun"):
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else report.longreprtext
            reason = (reason.strip().splitlines() or [""])[0]
            self._terminal.write_line(f"\n{report.outcome} ({report.when}): {report.nodeid}: {reason[:200]}")


@pytest.hookimpl(trylast=True)  # after the reporter itself
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput") and os.environ.get("CI") == "true":
        config.pluginmanager.register(FailuresAsTheyCome(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders of FIRST first. Short files are left for the end, so that no worker is idle then."""
    items.sort(key=lambda item: next((at for at, room in enumerate(FIRST) if item.nodeid.startswith(room)), len(FIRST)))


def pytest_collection_finish() -> None:
    """Keep modules and tests out of garbage collection, which otherwise scans all of torch again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """End what a failed test left running, which would keep pytest itself from ending."""
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a file in the checkout or an environment variable behind.

    With HPC_TRAIN_LEFTOVERS=warn in the environment there is only a warning in the summary, for a checkout that is
    edited during the tests.
    """
    before = leftovers.record_surroundings()
    yield
    may_fork = request.node.get_closest_marker("forks_beside_threads") is not None
    if found := leftovers.list_leftovers(before, may_fork):
        text = f"{request.node.nodeid} left behind: {'; '.join(found)}"
        if os.environ.get("HPC_TRAIN_LEFTOVERS") != "warn":
            pytest.fail(text, pytrace=False)
        warnings.warn(text, stacklevel=1)


@pytest.fixture(autouse=True)
def _no_false_alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in whose runs a hang or a slow node was noticed, unless its own faults caused that."""
    yield
    folder = request.node.funcargs.get("tmp_path")
    if folder is None or request.node.get_closest_marker("hangs") is not None:
        return
    if found := false_alarms.list_false_alarms(folder):
        pytest.fail("false alarms: " + "; ".join(found), pytrace=False)
