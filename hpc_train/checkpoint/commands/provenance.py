"""What `inspect` says of how a step came to be: when, by which code and attempt, and how long each part of it took."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hpc_train.checkpoint.manifest import Manifest
from hpc_train.checkpoint.origin import to_json

PARTS = ("copy", "prepare", "write", "agree", "commit")
"""Of a save, one after the other (see origin.Times)."""


def provenance(manifest: Manifest) -> dict[str, Any]:
    """`origin` and `times` of its manifest; None for what an earlier release, or no training, has written."""
    origin, times = manifest.origin, manifest.times
    return {
        "origin": None if origin is None else to_json(origin),
        "times": None if times is None else to_json(times),
    }


def in_words(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of those, for a person."""
    origin, times = facts["origin"] or {}, facts["times"]
    lines = []
    if times is not None:
        spent = [f"{part} {times[part]:.2f}" for part in PARTS if part in times]
        lines.append(("saved", moment(times["at"]) + (f", attempt {origin['attempt']}" if "attempt" in origin else "")))
        stall, slowest = f"{times['stall']:.2f} of it waited for by the training", times["slowest_rank"]
        lines.append(("seconds", f"{', '.join(spent)} (slowest rank: {slowest}); {stall}"))
    if origin:
        lines.append(("code", f"hpc_train {origin['version']}, sha256 {origin['code']}"))
    lines += [(what, f"sha256 {origin[what]}") for what in ("config", "model") if what in origin]
    return lines


def moment(time: object) -> str:
    """Seconds since the epoch as local time; nothing for what is no time."""
    try:
        return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}" if isinstance(time, (int, float)) else ""
    except (OverflowError, OSError, ValueError):
        return ""
