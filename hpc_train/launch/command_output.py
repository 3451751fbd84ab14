"""Pass the lines that a launch reports to its caller, who prints them: nothing below cli/ prints.

A function that only adds remarks takes `report`; one that also has results takes a CommandOutput. Code that runs inside
a job prints to the log of that job.
"""

from __future__ import annotations

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
