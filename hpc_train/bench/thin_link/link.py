"""Run two ranks in two network namespaces that are joined by a link, whose rate a rank can limit."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.bench.local_ranks import wait_for_ranks
from hpc_train.errors import UserError
from hpc_train.processes import signal_at_parent_end

RANKS = 2
MEASURED_FILE = "measured.json"
"""File to which rank 0 writes its measurement."""
INTERFACE = "link0"
"""Name of the network interface in both namespaces."""
_ADDRESSES = ("10.77.0.1/30", "10.77.0.2/30")
_FRAME = "9000"
"""Bytes of a jumbo frame: few packets, because cutting them takes CPU time here that a network card would not."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def run_linked_ranks(module: str, arguments: Sequence[str], threads: int) -> int:
    """Run a module as two linked ranks of some threads each; returns the first exit code that is not 0.

    A rank gets its number, and then the arguments. Raises as `start_in_namespaces`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": INTERFACE}
    commands = [[sys.executable, "-m", module, str(rank), *arguments] for rank in range(RANKS)]
    processes = start_in_namespaces(commands, environment)
    try:
        return wait_for_ranks(processes)
    finally:
        stop_processes(processes)


def start_in_namespaces(
    commands: Sequence[Sequence[str]], environment: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Start two commands in network namespaces of their own and link them; a line on stdin tells them when it is done.

    Raises UserError if this process lacks the permission or iproute2.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UserError(f"bench overlap: needs `{tool}`, which is not here; install iproute2")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            processes.append(_start_process(command, environment))
        first, second = (str(process.pid) for process in processes)
        ends = ["name", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second]
        _run_command("ip", "link", "add", *ends)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
    except BaseException:
        stop_processes(processes)
        raise
    return processes


def stop_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop the processes; their namespaces disappear with them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def configure_link(index: int) -> None:
    """Give this namespace's end of the link the address of process `index`."""
    _run_command("ip", "address", "add", _ADDRESSES[index], "dev", INTERFACE)
    for device, mtu in (("lo", "65536"), (INTERFACE, _FRAME)):
        _run_command("ip", "link", "set", device, "mtu", mtu, "up")


def limit_rate(mbit_per_second: float) -> None:
    """Limit the sending rate of this namespace with a token bucket."""
    bits = max(1, round(mbit_per_second * 1e6))
    burst = max(1 << 16, bits // 8 // 250)  # bytes between two ticks of a 250 Hz kernel clock
    bucket = ["rate", f"{bits}bit", "burst", str(burst), "latency", "100ms"]
    _run_command("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)


def count_sent_bytes() -> int:
    """Return the bytes that this namespace has sent over the link, with all protocol headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise AssertionError(f"no {INTERFACE} in this namespace")


def _start_process(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)

    def leave_network() -> None:
        if libc.unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "unshare")
        signal_at_parent_end(signal.SIGKILL)

    try:
        # preexec_fn is safe: this process has no other threads.
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, preexec_fn=leave_network)
    except subprocess.SubprocessError:
        raise UserError(
            "bench overlap: this process may not make a network namespace, which takes root; try `unshare --user "
            "--map-root-user --net hpc-train bench overlap`"
        ) from None


def _run_command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise UserError(f"bench overlap: `{' '.join(command)}` failed: {output}")
