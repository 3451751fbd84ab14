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
        """Of its only line."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


@dataclass(frozen=True)
class Terminal:
    """Where commands are called."""

    capture: pytest.CaptureFixture[str]

    def call(self, *words: str | Path | int) -> Printed:
        """Any exit code."""
        self.capture.readouterr()
        try:
            code = main(["checkpoint", *map(str, words)])
        except SystemExit as stopped:  # of the parser
            code = int(stopped.code or 0)
        printed = self.capture.readouterr()
        return Printed(code, printed.out, printed.err)

    def ok(self, *words: str | Path | int) -> Printed:
        """Exit code 0, nothing on stderr."""
        printed = self.call(*words)
        assert (printed.code, printed.err) == (0, ""), printed
        return printed

    def refused(self, *words: str | Path | int) -> str:
        """The one line of a user's mistake."""
        printed = self.call(*words)
        assert (printed.code, printed.out) == (2, ""), printed
        assert printed.err.startswith("hpc-train: ")
        assert printed.err.count("\n") == 1
        return printed.err
