"""Pass the lines that a launch reports to its caller, who prints them: nothing below cli/ prints.

A function that only adds remarks takes `report`; one that also has results takes a CommandOutput. Code that runs inside
a job prints to the log of that job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Report: TypeAlias = Callable[[str], None]
"""Takes a remark of one line."""


@dataclass(frozen=True)
class CommandOutput:
    """Functions that take the lines of a command."""

    print_result: Callable[[str], None]
    """Prints what the user asked for, to stdout."""
    print_message: Callable[[str], None]
    """Prints what else the user should know, to stderr."""
    describe_pace: Callable[[Path], str] = lambda run: ""
    """Says in a few words what holds a running training back, for its progress line; "" if that is not known."""

    def report(self, remark: str) -> None:
        """Print a remark as a message of `hpc-train`."""
        self.print_message(f"hpc-train: {remark}")


def print_to_job_log(line: str) -> None:
    """Print a line to the log of the job that this process runs in; nothing happens where that cannot be written.

    The disk may be full, or read-only for a moment, and what the line is about has to be done all the same.
    """
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  what is left in the buffer would make the exit fail, too
