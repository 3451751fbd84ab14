"""`hpc-train bench submit`: measure how long submitting a large sweep takes, and how many files it writes.

Every side sweeps the seed of the same configuration, with a --begin time so late that no job runs. Time is taken until
Slurm lists every point.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.launch.slurm.slurm_cli import client_environment, run_client

OUR_SIDE, PEER_SIDE = "hpc-train submit -m", "hydra-submitit-launcher"
_BEGIN = "now+2hours"
"""sbatch's --begin: long after the measurement, when every job is cancelled."""
_TIMEOUT_SECONDS = 1800.0
_APP = """\
import hydra
from hpc_train.config.compose import register

register()


@hydra.main(config_path="pkg://hpc_train.conf", config_name="config", version_base="1.3")
def main(cfg):
    return cfg.train.seed


main()
"""
"""The peer's application: the same configuration, without any work."""


@dataclass(frozen=True)
class Submission:
    """Cost of submitting a sweep once."""

    side: str
    wall_seconds: float
    """Seconds from the start of the command until Slurm lists every point."""
    cpu_seconds: float
    """CPU seconds of the command and its children, until they end or are killed after the submission."""
    files: int
    """Regular files that the submission wrote."""
    mebibytes: float


def run_submission_command(points: int, rounds: int, peers: bool, as_json: bool) -> int:
    """Submit a sweep and print wall time, CPU time and files; returns the exit code.

    peers: submit with hydra-submitit-launcher too. Raises UserError if there is no Slurm, or the peer is not installed.
    """
    if run_client(["sinfo", "--version"]).code:
        raise UserError("bench submit: needs Slurm's commands; `make slurm-up` starts a cluster on a Debian machine")
    if peers and importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError(
            "bench submit --peers: hydra-submitit-launcher is not here; pip install hydra-submitit-launcher"
        )
    sides = [_submit_ours, _submit_peer] if peers else [_submit_ours]
    # Round by round, so that a change of load on the machine meets both sides.
    measured = [side(points) for _ in range(rounds) for side in sides]
    if as_json:
        print(json.dumps({"points": points, "rounds": [asdict(measurement) for measurement in measured]}))
    else:
        _print_result(points, measured)
    return EXIT_DONE


def _submit_ours(points: int) -> Submission:
    with tempfile.TemporaryDirectory(prefix="bench-submit-", dir=Path.cwd()) as folder:
        target = Path(folder) / "sweep"
        words = [sys.executable, "-m", "hpc_train", "submit", "-m", f"train.seed=range(0,{points})"]
        words += [f"run_dir={target}", "launch.name=bench-ours", f"+launch.extra.begin={_BEGIN}"]
        return _measure_submission(OUR_SIDE, words, "bench-ours", points, target)


def _submit_peer(points: int) -> Submission:
    with tempfile.TemporaryDirectory(prefix="bench-submit-", dir=Path.cwd()) as folder:
        application, target = Path(folder) / "application.py", Path(folder) / "sweep"
        application.write_text(_APP)
        words = [sys.executable, str(application), "-m", f"train.seed=range(0,{points})", f"hydra.sweep.dir={target}"]
        words += ["hydra/launcher=submitit_slurm", "hydra.launcher.name=bench-peer", "hydra.launcher.timeout_min=5"]
        words += [f"+hydra.launcher.additional_parameters.begin={_BEGIN}"]
        return _measure_submission(PEER_SIDE, words, "bench-peer", points, target)


def _measure_submission(side: str, words: Sequence[str], name: str, points: int, target: Path) -> Submission:
    """Run the command until Slurm lists all its points; then cancel them, and kill the command if it waits for them."""
    start, cpu_before = time.monotonic(), _read_children_seconds()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            env=client_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _wait_for_points(process, lambda: _count_queued(name) >= points)
            wall_seconds = time.monotonic() - start
            files = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
        except UserError as error:
            output.seek(0)
            last = output.read().decode(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"{side}: {error}: {' '.join(last)}") from None
        finally:
            run_client(["scancel", f"--name={name}"])
            _end_process(process)
    return Submission(side, wall_seconds, _read_children_seconds() - cpu_before, len(files), sum(files) / 2**20)


def _wait_for_points(process: subprocess.Popen[bytes], all_listed: Callable[[], bool]) -> None:
    """Poll until all points are listed. Raises UserError if the command fails before, or takes too long."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not all_listed():
        if process.poll():
            raise UserError(f"ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise UserError(f"not submitted within {_TIMEOUT_SECONDS:g} s")
        time.sleep(0.2)


def _count_queued(name: str) -> int:
    """Count the points in Slurm's queue whose jobs have this name; an array element is one."""
    return len(run_client(["squeue", "--noheader", "--array", f"--name={name}", "--format=%i"]).out.split())


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Let the command end by itself, as its jobs are cancelled, or kill it with its children."""
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_children_seconds() -> float:
    """Return the CPU seconds that all child processes which have ended have used so far."""
    times = os.times()
    return times.children_user + times.children_system


def _print_result(points: int, measured: Sequence[Submission]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a sweep of {points:,} points handed to Slurm, medians", box=None)
    for column in ("", "wall s", "CPU s", "files", "MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for side in dict.fromkeys(measurement.side for measurement in measured):
        of_side = [measurement for measurement in measured if measurement.side == side]
        values = [
            statistics.median(measurement.wall_seconds for measurement in of_side),
            statistics.median(measurement.cpu_seconds for measurement in of_side),
            statistics.median(measurement.files for measurement in of_side),
            statistics.median(measurement.mebibytes for measurement in of_side),
        ]
        table.add_row(side, *(f"{value:,.2f}" for value in values))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
