"""End with the parent process, keep freed memory, and read from /proc what another process is and whether it lives.

Imports only the standard library: ranks use it before they import torch.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Mapping
from pathlib import Path

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_STATE, _PARENT, _START_TIME = 0, 1, 19
"""Where a field of proc_pid_stat(5) is in what _read_stat_fields returns, which begins after the process's name."""
_HEAP_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")
"""Variables with which a user sets glibc's allocator, or preloads another one."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from malloc.h."""
_LARGEST_HEAP_BLOCK = 32 << 20
"""Blocks of more bytes are mapped by themselves, and unmapped when freed. glibc's own threshold grows up to this."""


def signal_at_parent_end(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends."""
    import ctypes  # only where it is needed: it loads libffi

    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(number), 0, 0, 0)


def keep_freed_memory(kept_bytes: int, env: Mapping[str, str]) -> None:
    """Let this process keep the memory that it frees, for what it allocates next.

    By default glibc gives it back to the kernel, which then maps and clears every page anew. Leaves alone what the user
    has set in `env`, and other C libraries and allocators. kept_bytes: maximum that stays free at the end of the heap.
    """
    import ctypes

    is_set = any(name in env for name in _HEAP_VARIABLES) or "glibc.malloc" in env.get("GLIBC_TUNABLES", "")
    if is_set or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
    libc.mallopt(_M_TRIM_THRESHOLD, kept_bytes)


def identify_machine() -> str:
    """Return a text that tells this boot of this machine, and this container on it, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def read_start_time(process: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if there is none, or only a zombie."""
    fields = _read_stat_fields(process)
    return None if fields is None or fields[_STATE] in "ZX" else fields[_START_TIME]


def list_child_processes(parent: int) -> list[int]:
    """Return the ids of the processes that a process has started and that still exist."""
    ids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    fields_by_id = {process: _read_stat_fields(process) for process in ids}
    return [process for process, fields in fields_by_id.items() if fields and int(fields[_PARENT]) == parent]


def read_process_age(process: int) -> float | None:
    """Return for how many seconds a process has existed, by a clock that cannot be set; None if there is none."""
    started = read_start_time(process)
    if started is None:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK"))


def is_process_alive(process: int, started: str, machine: str) -> bool | None:
    """Return whether a process is alive; None if it is not on this machine.

    process: its id. started: as from read_start_time: the id alone may be another process's by now.
    machine: as from identify_machine.
    """
    if not process or machine != identify_machine():
        return None
    return read_start_time(process) == started


def is_process_id_used(process: int) -> bool:
    """Return whether some process of this machine has this id, whoever owns it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # another user's, or a number that is no process id, of which nothing is known
    return True


def _read_stat_fields(process: int) -> list[str] | None:
    """Return what /proc/<pid>/stat says after the process's name; None if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split() or None  # the name may hold ")" and blanks
