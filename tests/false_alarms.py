"""Find runs of a test that were reported to hang, although the test did not make them hang."""

from __future__ import annotations

import json
import re
from pathlib import Path

_INJECTED = re.compile(r"\d+:\w+:\d+:\w+")
"""Name of the file that a fault of launch/faulty_model.py leaves beside its run."""
_ALARMS = ("hang", "slow_node")


def list_false_alarms(folder: Path) -> list[str]:
    """Return a line for each alarm in runs, at most three levels below a folder, without an injected fault."""
    found: list[str] = []
    for pattern in ("*", "*/*", "*/*/*"):
        for path in folder.glob(f"{pattern}/events.jsonl"):
            ordered = any((path.parent / "chaos").glob("*.obeyed"))
            if not ordered and not any(_INJECTED.match(file.name) for file in path.parents[1].iterdir()):
                found += [f"{path.parent}: {line}" for line in _read_alarms(path)]
    return found


def _read_alarms(path: Path) -> list[str]:
    """Return the lines of events.jsonl that are alarms. Tests also write lines to such files that are not events."""
    if not path.is_file():
        return []
    lines = path.read_text(errors="replace").splitlines()
    return [line for line in lines if any(f'"event": {json.dumps(kind)}' in line for kind in _ALARMS)]
