"""Signals ask a process to stop; they never end it, whenever they come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.runtime.stop_request import STOP_SIGNALS, StopRequest, block_stop_signals

# Says on stdout which signal asked it to stop; the byte on stdin is the go to install the handlers.
CHILD = """
import sys
sys.stdin.read(1)
from hpc_train.runtime import stop_request as stop
request = stop.install_stop_handlers()
assert "torch" not in sys.modules
print("installed", flush=True)
sys.stdin.read(1)
try:
    print(request.signal_name, request.requested, flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def child() -> subprocess.Popen[str]:
    with block_stop_signals():
        return subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("x")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_handlers_are_there_is_kept(number: signal.Signals) -> None:
    with child() as process:
        process.send_signal(number)
        assert go(process) == "installed"
        assert go(process) == f"{number.name} True"


def test_the_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    with child() as process:
        assert go(process) == "installed"
        process.send_signal(signal.SIGINT)
        assert go(process) == "SIGINT True"
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"


def test_ctrl_c_after_another_stop_signal_does_not_interrupt() -> None:
    with child() as process:
        assert go(process) == "installed"
        process.send_signal(signal.SIGTERM)
        assert go(process) == "SIGTERM True"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
        assert (output, process.returncode) == ("", 0)


def test_holding_back_leaves_this_process_as_it_was() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with block_stop_signals():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert set(STOP_SIGNALS) <= blocked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_only_the_first_request_counts() -> None:
    request = StopRequest()
    assert not request.requested
    request.ask("SIGUSR2")
    request.ask("SIGTERM")
    assert request.signal_name == "SIGUSR2"


def test_installing_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from hpc_train.runtime import stop_request as stop; "
        "print(sorted({'torch', 'numpy', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ
    )
    assert done.stdout == "[]\n"
