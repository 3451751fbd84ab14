"""Which task is which rank, and where: rankmap.json, as the attempt itself wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.regular_files import read_json

RANK_MAP = "rankmap.json"


def entries(folder: Path) -> list[dict[str, Any]]:
    """The ranks that a rank map in `folder` lists; [] where ranks have not got as far as to write one."""
    try:
        found = read_json(folder / RANK_MAP)["ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [entry for entry in found if isinstance(entry, dict)]


def task_of(folder: Path, rank: int) -> int:
    """The task that is this rank; without a rank map launchers' order holds."""
    return next((int(entry["process"]) for entry in entries(folder) if entry["rank"] == rank), rank)


def rank_of(folder: Path, task: int) -> int:
    """The rank that a task is."""
    return next((int(entry["rank"]) for entry in entries(folder) if entry["process"] == task), task)
