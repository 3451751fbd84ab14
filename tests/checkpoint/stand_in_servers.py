"""Puts the stand-in for `lfs` on PATH, and records its calls."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.storage.file_system import LUSTRE_MAGIC

SCRIPT = Path(__file__).with_name("stand_in_lfs.py")


@dataclass(frozen=True)
class Servers:
    """The directory of the stand-in."""

    home: Path

    @property
    def calls(self) -> list[list[str]]:
        """Return the arguments of every call so far."""
        path = self.home / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def are(self, **facts: Any) -> None:
        """Set what the servers are; stand_in_lfs.py lists the keys."""
        (self.home / "servers.json").write_text(json.dumps(facts))


def put_on_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Provide `lfs` to this process and all that it starts."""
    home.mkdir()
    command = home / "bin" / "lfs"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I {shlex.quote(str(SCRIPT))} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_LFS", str(home))
    return Servers(home)


def on_lustre(directory: Path) -> int:
    """Return what statfs(2) reports for any directory on Lustre."""
    return LUSTRE_MAGIC
