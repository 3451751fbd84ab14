"""Notice that a cloud is about to take a machine away: a file appears, or a command succeeds.

Clouds announce the end of a spot machine in advance, each in its own way: an address to query, or a file that the
cloud's agent writes. `resilience.notice` names the file or the command; a notice counts like SIGTERM for all ranks.

Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_MAX_TEXT = 200


@dataclass
class NoticeWatch:
    """Checks for a notice from time to time, without ever blocking."""

    file: str | None = None
    """There is a notice when this file exists and is not empty."""
    command: Sequence[str] = ()
    """There is a notice when this command, run without a shell, exits with 0 and prints something."""
    every_seconds: float = 5.0
    timeout_seconds: float = 10.0
    """A command that takes longer is killed; that is no notice."""
    failure: str | None = None
    """Why the command cannot be run; a watcher that sees nothing has to say so."""
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)
    _begun: float = field(default=float("-inf"), repr=False)

    def poll(self) -> str | None:
        """Return the text of a notice, one line; None if there is none yet."""
        return self._read_file() or self._ask_command()

    def close(self) -> None:
        """End a command that still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read_file(self) -> str | None:
        if self.file is None:
            return None
        with suppress(OSError):
            # The file belongs to an agent of the cloud, so nothing about it is taken for granted.
            # Without O_NONBLOCK a named pipe in its place would wait for a writer.
            descriptor = os.open(self.file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                return _first_line(os.read(descriptor, 4096).decode(errors="replace"))
            finally:
                os.close(descriptor)
        return None

    def _ask_command(self) -> str | None:
        if not self.command:
            return None
        if self._process is None:
            if time.monotonic() - self._begun >= self.every_seconds:
                self._start_command()
            return None
        if self._process.poll() is None:
            if time.monotonic() - self._begun > self.timeout_seconds:
                self.close()
            return None
        output, _ = self._process.communicate()
        code, self._process = self._process.returncode, None
        return _first_line(output) if code == 0 else None

    def _start_command(self) -> None:
        self._begun = time.monotonic()
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
                # A session of its own: a Ctrl-C for the run does not reach it, and it cannot ask on our terminal.
                start_new_session=True,
            )
            self.failure = None
        except OSError as error:
            self.failure = f"{self.command[0]}: {error.strerror}"


def _first_line(text: str) -> str | None:
    """Return the first line that is not empty, without control characters; None if there is none."""
    for line in text.splitlines():
        printable = "".join(character for character in line if character.isprintable()).strip()
        if printable:
            return printable[:_MAX_TEXT]
    return None
