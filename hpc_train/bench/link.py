"""Two processes of this machine, each in a network namespace of its own, and one link between them of a given rate.

Namespaces and link exist as long as the processes: there is nothing to clean up, whatever ends this one.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import UserError

INTERFACE = "link0"
"""Name of the link's end in either namespace."""
_ADDRESSES = ("10.77.0.1/30", "10.77.0.2/30")
_FRAME = "9000"
"""Bytes of a jumbo frame: what cuts packets here is a CPU that a network card would leave to the products."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def start_apart(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Start two commands, each in its own network namespace, and link these; a line on stdin says when that is done.

    Raises UserError where this process may not do that or has no iproute2.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UserError(f"bench overlap: needs `{tool}`, which is not here; install iproute2")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            processes.append(_start(command, environment))
        first, second = (str(process.pid) for process in processes)
        ends = ["name", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second]
        _run("ip", "link", "add", *ends)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
    except BaseException:
        stop(processes)
        raise
    return processes


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes, and with them their namespaces."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def bring_up(index: int) -> None:
    """Called in a namespace: give its end of the link the address of process `index`."""
    _run("ip", "address", "add", _ADDRESSES[index], "dev", INTERFACE)
    for device, mtu in (("lo", "65536"), (INTERFACE, _FRAME)):
        _run("ip", "link", "set", device, "mtu", mtu, "up")


def limit(mbit_per_second: float) -> None:
    """Called in a namespace: limit what it sends to a rate, by a token bucket."""
    bits = max(1, round(mbit_per_second * 1e6))
    burst = max(1 << 16, bits // 8 // 250)  # what may go out between two ticks of a slow kernel clock
    bucket = ["rate", f"{bits}bit", "burst", str(burst), "latency", "100ms"]
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)


def sent_bytes() -> int:
    """Called in a namespace: what it has sent over the link so far, with the headers of every protocol."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise AssertionError(f"no {INTERFACE} in this namespace")


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)

    def leave_network() -> None:
        if libc.unshare(_NEW_NETWORK) or libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL):
            raise OSError(ctypes.get_errno(), "unshare")

    try:
        # preexec_fn is safe: this process has no other threads.
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, preexec_fn=leave_network)
    except subprocess.SubprocessError:
        raise UserError(
            "bench overlap: this process may not make a network namespace, which takes root; try `unshare --user "
            "--map-root-user --net hpc-train bench overlap`"
        ) from None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise UserError(f"bench overlap: `{' '.join(command)}` failed: {said}")
