"""Seconds from the start of this process to its first step, by part."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class StartUp:
    """`mark` ends a part; the first one began with the process, before any line of Python ran."""

    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part, in the order of time."""

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to `part`."""
        self.parts[part] = process_age() - sum(self.parts.values())


def process_age() -> float:
    """Seconds since the kernel started this process, to a clock tick (proc(5), field `starttime` of stat)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2]
    ticks = int(after_name.split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
