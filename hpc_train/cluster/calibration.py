"""Measured constants of a cluster: written by `bench collectives`, read by placement and the planner."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.errors import UserError

VERSION = 1


@dataclass(frozen=True)
class Constants:
    """Hockney's model of one level of the fabric: a message of n bytes takes latency + n / bandwidth."""

    level: str
    """inside (two ranks of a node), or the level of placement.fabric whose groups the messages left."""
    latency: float
    """Seconds (alpha)."""
    bandwidth: float
    """Bytes/s, one direction, out of one group of the level (1 / beta); inside: between two ranks."""


@dataclass(frozen=True)
class Calibration:
    """What one cluster measured, with one backend."""

    cluster: str
    backend: str
    """gloo, nccl or mpi."""
    date: str
    """ISO 8601, UTC."""
    levels: tuple[Constants, ...]

    def of(self, level: str) -> Constants | None:
        """The constants of a level, if it was measured."""
        return next((it for it in self.levels if it.level == level), None)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write it as JSON; an existing file is replaced at once or not at all."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps({"version": VERSION, **asdict(calibration)}, indent=1) + "\n")
    beside.replace(path)


def read_calibration(path: Path) -> Calibration:
    """Raises UserError, one line, for a file that is not a calibration."""
    try:
        content = json.loads(path.read_text())
        if content.pop("version") != VERSION:
            raise UserError(f"{path}: written by another version; run `hpc-train bench collectives` again")
        levels = tuple(Constants(str(it["level"]), *_numbers(it)) for it in content["levels"])
        return Calibration(str(content["cluster"]), str(content["backend"]), str(content["date"]), levels)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not a calibration as `hpc-train bench collectives` writes it") from None


def _numbers(entry: dict[str, float]) -> tuple[float, float]:
    latency, bandwidth = float(entry["latency"]), float(entry["bandwidth"])
    if not (0 <= latency < float("inf") and 0 < bandwidth < float("inf")):
        raise ValueError
    return latency, bandwidth
