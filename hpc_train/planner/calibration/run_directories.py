"""Read run directories of hpc_train (config.yaml, metrics.jsonl) as measured runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.config.plain_config import config_from_dict
from hpc_train.config.run import RunConfig
from hpc_train.config.run_file import load_run_file
from hpc_train.config.schema import seal_config
from hpc_train.errors import UserError
from hpc_train.placement.described_cluster import count_nodes, count_ranks_per_node
from hpc_train.planner.calibration.run_table import MeasuredRun
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import job_columns
from hpc_train.regular_files import read_json
from hpc_train.training.records.run_records import read_metrics

_WARM_UP = 2
"""First steps that are left out: allocator, compilation and collectives start up in them."""
_FEWEST = 3
"""Minimum number of steps after the first ones."""


def read_run_directory(folder: Path, calibration: Path | None) -> MeasuredRun:
    """Read one run directory as a measured run. calibration: file to use instead of the run's cluster.calibration.

    Raises UserError for a directory that is no run, and for a run of too few steps.
    """
    config = _read_config(folder)
    cluster = replace(config.cluster, calibration=str(calibration) if calibration else None)
    config = seal_config(replace(config, cluster=cluster))
    ranks = _count_ranks(folder, config)
    columns = {name: float(value) for name, value in job_columns(jobs_from_config(config, ranks)).items()}
    return MeasuredRun(
        id=str(folder),
        family="own",
        model=config.model.name,
        cluster=cluster.name,
        software="hpc_train",
        group=f"{cluster.name}/{config.model.name}",
        contest=f"{cluster.name}/{config.model.name}/{ranks}",
        seconds=_measure_median_step(folder),
        memory=math.nan,
        first_stage=False,
        memory_of="allocated",
        out_of_memory=False,
        columns=columns,
        assumed=(),
    )


def read_cluster_names(folders: Sequence[Path]) -> set[str]:
    """Return the names of the clusters that the runs ran on."""
    return {_read_config(folder).cluster.name for folder in folders}


def _read_config(folder: Path) -> RunConfig:
    path = folder / "config.yaml"
    try:
        return config_from_dict(load_run_file(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the directory of a run") from None
    except UserError:
        raise
    except Exception as error:  # whatever a file that is no configuration makes of the loader
        raise UserError(f"{path}: not the configuration of a run ({type(error).__name__})") from None


def _count_ranks(folder: Path, config: RunConfig) -> int:
    """Return the ranks as rank 0 wrote them when the run started, else those of the configuration."""
    try:
        return len(read_json(folder / "rankmap.json")["ranks"])
    except (OSError, ValueError, KeyError, TypeError):
        return count_nodes(config) * count_ranks_per_node(config)


def _measure_median_step(folder: Path) -> float:
    """Return the median step time without the first steps."""
    lines = read_metrics(folder / "metrics.jsonl")
    steps = [float(line["step_seconds"]) for line in lines[_WARM_UP:] if line.get("step_seconds")]
    if len(steps) < _FEWEST:
        raise UserError(f"{folder}: {len(lines)} steps in metrics.jsonl; {_WARM_UP + _FEWEST} are needed to calibrate")
    return statistics.median(steps)
