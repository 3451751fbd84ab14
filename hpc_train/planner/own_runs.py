"""Runs of one's own as measured runs: run directories with config.yaml and metrics.jsonl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.config.compose import from_container
from hpc_train.config.run import RunConfig
from hpc_train.config.run_file import load_run_file
from hpc_train.config.schema import seal
from hpc_train.errors import UserError
from hpc_train.placement.from_config import node_count, ranks_per_node
from hpc_train.planner.from_config import jobs_of
from hpc_train.planner.from_runs import Run
from hpc_train.planner.jobs import columns_of
from hpc_train.regular_files import read_json
from hpc_train.training.records import read_metrics

_WARM_UP = 2
"""First steps, which are not counted: allocators, compilation and collectives start up."""
_FEWEST = 3
"""Counted steps that a run needs."""


def read_run(folder: Path, calibration: Path | None = None) -> Run:
    """One run directory; calibration: the file that its machine's figures are taken from, in place of its own.

    Raises UserError for a directory that is none, and for a run of too few steps.
    """
    config = _config(folder)
    cluster = replace(config.cluster, calibration=str(calibration) if calibration else None)
    config = seal(replace(config, cluster=cluster))
    ranks = _ranks(folder, config)
    columns = {name: float(it) for name, it in columns_of(jobs_of(config, ranks)).items()}
    return Run(
        id=str(folder),
        family="own",
        model=config.model.name,
        cluster=cluster.name,
        software="hpc_train",
        group=f"{cluster.name}/{config.model.name}",
        contest=f"{cluster.name}/{config.model.name}/{ranks}",
        seconds=_seconds(folder),
        memory=math.nan,
        first_stage=False,
        memory_of="allocated",
        out_of_memory=False,
        columns=columns,
        assumed=(),
    )


def clusters_of(folders: Sequence[Path]) -> set[str]:
    """Names of the clusters that the runs were on."""
    return {_config(folder).cluster.name for folder in folders}


def _config(folder: Path) -> RunConfig:
    path = folder / "config.yaml"
    try:
        return from_container(load_run_file(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the directory of a run") from None
    except UserError:
        raise
    except Exception as error:  # whatever a file that is no configuration makes of the loader
        raise UserError(f"{path}: not the configuration of a run ({type(error).__name__})") from None


def _ranks(folder: Path, config: RunConfig) -> int:
    """As rank 0 wrote them when the run started; else those of the configuration."""
    try:
        return len(read_json(folder / "rankmap.json")["ranks"])
    except (OSError, ValueError, KeyError, TypeError):
        return node_count(config) * ranks_per_node(config)


def _seconds(folder: Path) -> float:
    """Median of the steps after the first ones."""
    lines = read_metrics(folder / "metrics.jsonl")
    steps = [float(line["step_seconds"]) for line in lines[_WARM_UP:] if line.get("step_seconds")]
    if len(steps) < _FEWEST:
        raise UserError(f"{folder}: {len(lines)} steps in metrics.jsonl; {_WARM_UP + _FEWEST} are needed to calibrate")
    return statistics.median(steps)
