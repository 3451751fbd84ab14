"""Run code as another user of this machine, which only root may do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOMEBODY = 61874
"""A uid that no user here has."""
_PREAMBLE = """
import json, os, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
arguments = json.loads(sys.argv[2])
"""


def need_root() -> None:
    """Skip the test if it cannot switch to another user."""
    if os.geteuid():
        pytest.skip("needs root: another user of the machine is tried")


def as_somebody(code: str, *arguments: Any, imports: str = "") -> Any:
    """Run Python code with `arguments`, a list, as another user; returns its output, parsed as JSON.

    Modules that this user may not read from disk are imported first: `imports`, such as "import torch".
    """
    need_root()
    command = [sys.executable, "-c", f"{imports}\n{_PREAMBLE}\n{code}", str(SOMEBODY), json.dumps(arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
