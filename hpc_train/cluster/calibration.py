"""Read and write the measured constants of a cluster.

`bench collectives` and `plan calibrate` write them; placement and the planner read them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.regular_files import read_json, replace_file

FORMAT_VERSION = 1


@dataclass(frozen=True)
class LevelConstants:
    """Latency and bandwidth of one level of the fabric.

    Hockney's model: a message of n bytes takes latency + n / bandwidth.
    """

    level: str
    """inside (two ranks of a node), or the level of placement.fabric whose groups the messages left."""
    latency: float
    """Seconds (alpha)."""
    bandwidth: float
    """Bytes/s, one direction, out of one group of the level (1 / beta); inside: between two ranks."""


@dataclass(frozen=True)
class DeviceMeasurement:
    """Speed of one rank's device, as `bench gemm` measured it."""

    name: str
    """Name of the device as torch has it; cpu for CPUs."""
    tflops: dict[str, float]
    """Speed of the fastest matrix product, 10^12 FLOP/s, by precision."""
    memory_gb_s: float
    """Bytes that a copy reads and writes per second, 10^9 bytes/s."""


@dataclass(frozen=True)
class StepResidual:
    """Difference between a measured run and the planner's model (see planner.constants)."""

    settings: dict[str, float]
    """Settings of the run, by name: planner.constants.RESIDUAL_SETTINGS."""
    weight: float
    """Weight of this residual for runs with similar settings, in log(time)."""


@dataclass(frozen=True)
class Calibration:
    """Measurements of one cluster with one backend."""

    cluster: str
    backend: str
    """gloo, nccl or mpi."""
    date: str
    """ISO 8601, UTC."""
    levels: tuple[LevelConstants, ...]
    device: DeviceMeasurement | None = None
    planner: dict[str, float] = field(default_factory=dict)
    """Constants of the planner that were adapted to runs on the cluster, by name."""
    residuals: tuple[StepResidual, ...] = ()
    """Residuals of these runs."""
    evidence: dict[str, int] = field(default_factory=dict)
    """How many of these runs had each technique (planner.evidence)."""

    def get_level(self, level: str) -> LevelConstants | None:
        """Return the constants of a level, or None if it was not measured."""
        return next((constants for constants in self.levels if constants.level == level), None)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the calibration as JSON; an existing file is replaced atomically."""
    replace_file(path, json.dumps({"version": FORMAT_VERSION, **asdict(calibration)}, indent=1) + "\n")


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file. Raises UserError, one line, for any other file."""
    try:
        content = read_json(path)
        if content.pop("version") != FORMAT_VERSION:
            raise UserError(f"{path}: written by another version; run `hpc-train bench collectives` again")
        levels = tuple(LevelConstants(str(entry["level"]), *_parse_constants(entry)) for entry in content["levels"])
        device = _parse_device(content["device"]) if content.get("device") else None
        planner = {str(name): float(value) for name, value in content.get("planner", {}).items()}
        cluster, backend, date = (str(content[name]) for name in ("cluster", "backend", "date"))
        residuals = tuple(_parse_residual(entry) for entry in content.get("residuals", []))
        evidence = {str(name): int(count) for name, count in content.get("evidence", {}).items()}
        return Calibration(
            cluster=cluster,
            backend=backend,
            date=date,
            levels=levels,
            device=device,
            planner=planner,
            residuals=residuals,
            evidence=evidence,
        )
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not a calibration as `hpc-train bench collectives` writes it") from None


def _parse_residual(entry: dict[str, Any]) -> StepResidual:
    settings = {str(name): float(value) for name, value in entry["settings"].items()}
    weight = float(entry["weight"])
    if not all(0 < value < math.inf for value in settings.values()) or not math.isfinite(weight):
        raise ValueError
    return StepResidual(settings, weight)


def _parse_device(content: dict[str, Any]) -> DeviceMeasurement:
    tflops = {str(name): float(value) for name, value in content["tflops"].items()}
    device = DeviceMeasurement(str(content["name"]), tflops, float(content["memory_gb_s"]))
    if not all(0 < value < math.inf for value in (*tflops.values(), device.memory_gb_s)):
        raise ValueError
    return device


def _parse_constants(entry: dict[str, float]) -> tuple[float, float]:
    latency, bandwidth = float(entry["latency"]), float(entry["bandwidth"])
    if not (0 <= latency < math.inf and 0 < bandwidth < math.inf):
        raise ValueError
    return latency, bandwidth
