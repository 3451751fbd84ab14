"""The id of a point: a hash of all that it was frozen with, behind a few words of what was swept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

_NOT_ITS_OWN = frozenset({"run_dir", "schema_version", "data.cache", "data.source", "model.source", "cluster.source"})
"""Where it lies, and what others say of its parts. All else that a sweep can be over belongs to it: of the settings
that a continued run may change (training/folder.py) those that are swept are the very point of the sweep."""
_OF_THE_SWEEP = frozenset({"launch.parallel_points", "launch.points_per_job", "launch.kind"})
_LONGEST = 40
_DIGITS = 12


def point_id(swept: Sequence[str], own: str) -> str:
    """`lr-0.1_seed-2-3f9a0c1d2b4e`: the same for the same overrides and the same frozen config, whenever it is asked.

    own: its `digest`.
    """
    words = "_".join(filter(None, map(_short, swept)))[:_LONGEST].rstrip("-_.") or "point"
    return f"{words}-{own[:_DIGITS]}"


def digest(container: dict[str, Any]) -> str:
    """Of the frozen config: equal where, and only where, two points are the same run."""
    left_out = _NOT_ITS_OWN | _OF_THE_SWEEP
    own = {key: value for key, value in _flat(container, "") if key not in left_out}
    return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


def _short(word: str) -> str:
    """optim.lr=0.1 as lr-0.1."""
    key, _, value = word.partition("=")
    last = re.split(r"[./]", key.lstrip("+~"))[-1]
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{last}-{value}").strip("-.")


def _flat(node: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [pair for name, sub in node.items() for pair in _flat(sub, f"{path}{name}.")]
    return [(path[:-1], node)]
