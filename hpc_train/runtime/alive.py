"""Whether a process that once wrote its number down is still the same one, and alive."""

from __future__ import annotations

from pathlib import Path


def machine() -> str:
    """Tells this boot of this machine, and this container of it, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def start_of(process: int) -> str | None:
    """Field 22 of proc_pid_stat(5); None if there is no such process, or only what its parent has not yet heard of."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def is_alive(process: int, started: str, on: str) -> bool | None:
    """Whether process `process`, started at `started` on machine `on`, lives; None if that is not this machine."""
    if not process or on != machine():
        return None
    return start_of(process) == started
