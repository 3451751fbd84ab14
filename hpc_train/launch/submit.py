"""`hpc-train submit`: freeze the run, hand it to Slurm, return at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.clients import answered, ask
from hpc_train.launch.code.snapshot import snapshot
from hpc_train.launch.code.users import tidy
from hpc_train.launch.dependencies import jobs_to_wait_for
from hpc_train.launch.partitions import check_partition
from hpc_train.launch.precheck import check_cluster_files
from hpc_train.launch.request import Request, make_request, nodes_of
from hpc_train.launch.slurm import render, submit
from hpc_train.launch.train import check_run, freeze, planned
from hpc_train.launch.whole import refuse_open, submission
from hpc_train.training.folder import RunFolder, open_folder
from hpc_train.training.records import add_event


def with_slurm(overrides: Sequence[str]) -> list[str]:
    """`submit` means Slurm: its groups are chosen where the user chose none."""
    chosen = {text.split("=")[0] for text in overrides}
    return [f"{group}=slurm" for group in ("cluster", "launch") if group not in chosen] + list(overrides)


def submit_command(
    overrides: Sequence[str], config_dir: str | None, dry_run: bool, as_json: bool, after: Sequence[str] = ()
) -> int:
    """Submit one run, or print what would be submitted; returns the exit code. What sbatch refuses leaves nothing.

    after: runs that must have ended well before this one starts.
    """
    config = compose(overrides, config_dir)
    if config.launch.kind != "slurm":
        raise UserError(
            f"launch={config.launch.kind}: `hpc-train submit` sends to Slurm; use `hpc-train train` to run here"
        )
    nodes = config.cluster.nodes
    config, why = planned(config, nodes * config.cluster.ranks_per_node if nodes else None)
    ranks = nodes_of(config) * config.cluster.ranks_per_node
    folder = open_folder(config)
    code = snapshot(config, folder.path)
    request = make_request(config, folder, code).after(jobs_to_wait_for(after, ask))
    if dry_run:
        check_run(config, ranks)
        check_cluster_files(config)
        script = render(folder, request)
        print(json.dumps({"run_dir": str(folder.path), "ranks": ranks, "script": script}) if as_json else script)
        return 0
    check_partition(config, request, ask)
    with answered(), submission(folder.path):
        refuse_open(folder.path, ask)
        with code.kept_for(folder.path) if code else nullcontext():
            freeze(config, ranks, folder, why, code)
            jobs = submit(folder, request)
            record(folder, request, jobs)
    _tell(folder, request, jobs, as_json)
    if code:
        tidy(code.path.parent)
    return 0


def record(folder: RunFolder, request: Request, jobs: Sequence[str]) -> None:
    """The submission as an event of the run."""
    chain = {"job_ids": jobs} if len(jobs) > 1 else {}
    if request.code:
        add_event(folder.events, "snapshot", -1, hash=request.code.hash, sources=request.code.sources)
    add_event(folder.events, "submit", -1, job_id=jobs[0], nodes=request.nodes, ranks=request.ranks, **chain)


def _tell(folder: RunFolder, request: Request, jobs: Sequence[str], as_json: bool) -> None:
    if as_json:
        chain = {"job_ids": jobs} if len(jobs) > 1 else {}
        print(json.dumps({"job_id": jobs[0], "run_dir": str(folder.path), "ranks": request.ranks, **chain}))
        return
    what = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {', '.join(jobs)}, one after the other"
    print(f"{what}: nodes {request.nodes} x ranks {request.ranks_per_node}, run directory {folder.path}")
