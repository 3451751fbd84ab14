"""Slurm steps of the benchmark: a calibration, and trainings whose nodes come in a given order."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import UserError

_WARM_UP = 2
"""Steps of a training that are not counted."""


SMALLEST = 64 << 10
"""Bytes of the smallest message of the calibration: latency and bandwidth need two sizes."""


def calibrate(folder: Path, nodes: Sequence[str], ranks_per_node: int, largest: str, overrides: Sequence[str]) -> Path:
    """Measure the levels of the fabric with `bench collectives`; returns the calibration file."""
    path = folder / "calibration.json"
    sizes = ["--min", str(SMALLEST), "--max", largest, "--rounds", "3", "--operation", "all_reduce", "--plain"]
    _step(folder, "calibrate", nodes, ranks_per_node, ["bench", "collectives", *sizes, "--out", str(path), *overrides])
    return path


def train(
    folder: Path, name: str, nodes: Sequence[str], ranks_per_node: int, overrides: Sequence[str]
) -> tuple[float, list[str]]:
    """Train in a new run directory; returns (median seconds of a step, hosts in the order of the ranks)."""
    run = folder / name
    _step(folder, name, nodes, ranks_per_node, ["train", *overrides, f"run_dir={run}"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = json.loads((run / "rankmap.json").read_text())["ranks"]
    hosts = [str(it["host"]) for it in sorted(ranks, key=lambda it: int(it["rank"]))]
    return statistics.median(float(line["step_seconds"]) for line in lines[_WARM_UP:]), hosts


def _step(folder: Path, name: str, nodes: Sequence[str], ranks_per_node: int, words: Sequence[str]) -> None:
    """Run `hpc-train` on the nodes in this order (srun --distribution=arbitrary, SLURM_HOSTFILE)."""
    hosts = folder / f"{name}.hosts"
    hosts.write_text("".join(f"{node}\n" for node in nodes for _ in range(ranks_per_node)))
    srun = ["srun", "--distribution=arbitrary", f"--ntasks={len(nodes) * ranks_per_node}"]
    env = {key: value for key, value in os.environ.items() if key not in _OF_THE_JOB}
    done = subprocess.run(
        [*srun, sys.executable, "-m", "hpc_train", *words],
        env={**env, "SLURM_HOSTFILE": str(hosts)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / f"{name}.log").write_text(done.stdout)
    if done.returncode:
        said = next((line for line in done.stdout.splitlines() if line.startswith("hpc-train:")), None)
        raise UserError(f"{name}: {said or f'srun ended with {done.returncode}'}; see {folder / f'{name}.log'}")


_OF_THE_JOB = ("SLURM_DISTRIBUTION", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
"""What the allocation was asked for with, and srun would take for its own options."""
