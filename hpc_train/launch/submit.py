"""`hpc-train submit`: freeze the run, hand it to Slurm, return at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.slurm import make_request, nodes_of, render, submit
from hpc_train.launch.train import check_run, freeze, planned
from hpc_train.training.folder import open_folder
from hpc_train.training.records import add_event


def with_slurm(overrides: Sequence[str]) -> list[str]:
    """`submit` means Slurm: its groups are chosen where the user chose none."""
    chosen = {text.split("=")[0] for text in overrides}
    return [f"{group}=slurm" for group in ("cluster", "launch") if group not in chosen] + list(overrides)


def submit_command(overrides: Sequence[str], config_dir: str | None, dry_run: bool, as_json: bool) -> int:
    """Submit one run, or print what would be submitted; returns the exit code. What sbatch refuses leaves nothing."""
    config = compose(overrides, config_dir)
    if config.launch.kind != "slurm":
        raise UserError(
            f"launch={config.launch.kind}: `hpc-train submit` sends to Slurm; use `hpc-train train` to run here"
        )
    nodes = config.cluster.nodes
    config, why = planned(config, nodes * config.cluster.ranks_per_node if nodes else None)
    ranks = nodes_of(config) * config.cluster.ranks_per_node
    folder = open_folder(config)
    request = make_request(config, folder)
    if dry_run:
        check_run(config, ranks)
        script = render(folder, request)
        print(json.dumps({"run_dir": str(folder.path), "ranks": ranks, "script": script}) if as_json else script)
        return 0
    new = not folder.path.exists()
    freeze(config, ranks, folder, why)
    try:
        job_id = submit(folder, request)
    except UserError:
        if new:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    add_event(folder.events, "submit", -1, job_id=job_id, nodes=request.nodes, ranks=request.ranks)
    if as_json:
        print(json.dumps({"job_id": job_id, "run_dir": str(folder.path), "ranks": ranks}))
    else:
        print(f"job {job_id}: nodes {request.nodes} x ranks {request.ranks_per_node}, run directory {folder.path}")
    return 0
