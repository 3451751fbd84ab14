"""`hpc-train checkpoint ...` as a user calls it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.main import main


@dataclass(frozen=True)
class Printed:
    """What a command left on the terminal."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Parse stdout, which must be one line of JSON."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


@dataclass(frozen=True)
class Terminal:
    """Calls commands in one directory."""

    capture: pytest.CaptureFixture[str]

    def call(self, *words: str | Path | int) -> Printed:
        """Call a command; any exit code is accepted."""
        self.capture.readouterr()
        try:
            code = main(["checkpoint", *map(str, words)])
        except SystemExit as stopped:  # of the parser
            code = int(stopped.code or 0)
        printed = self.capture.readouterr()
        return Printed(code, printed.out, printed.err)

    def ok(self, *words: str | Path | int) -> Printed:
        """Call a command that must exit 0 with nothing on stderr."""
        printed = self.call(*words)
        assert (printed.code, printed.err) == (0, ""), printed
        return printed

    def refused(self, *words: str | Path | int) -> str:
        """Call a command that must refuse a user's mistake; returns the one line on stderr."""
        printed = self.call(*words)
        assert (printed.code, printed.out) == (2, ""), printed
        assert printed.err.startswith("hpc-train: ")
        assert printed.err.count("\n") == 1
        return printed.err
