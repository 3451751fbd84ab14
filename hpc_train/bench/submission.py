"""`hpc-train bench submit`: what it takes to hand a large sweep to Slurm, and what that leaves on the disk.

Every side sweeps the seed of the same configuration, held back by --begin, so that nothing runs. Its clock stops when
Slurm knows every point.
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
from hpc_train.launch.clients import ask, client_environment

OURS, PEER = "hpc-train submit -m", "hydra-submitit-launcher"
_LATER = "now+2hours"
_PATIENCE = 1800.0
_APP = """\
import hydra
from hpc_train.config.store import register

register()


@hydra.main(config_path="pkg://hpc_train.conf", config_name="config", version_base="1.3")
def main(cfg):
    return cfg.train.seed


main()
"""
"""The peer's application: the same configuration, and nothing to do."""


@dataclass(frozen=True)
class Submitted:
    """One sweep, submitted once."""

    side: str
    wall_seconds: float
    """From the command to the moment at which Slurm knows every point."""
    cpu_seconds: float
    """Of the command and its children, up to the same moment for a command that ends there."""
    files: int
    """Regular files that the submission wrote."""
    mebibytes: float


def submission_command(points: int, rounds: int, peers: bool, as_json: bool) -> int:
    """Print wall time, CPU time and files of submitting a sweep; peers: beside the peer's. Returns the exit code.

    Raises UserError where there is no Slurm, or no peer though it was asked for.
    """
    if ask(["sinfo", "--version"]).code:
        raise UserError("bench submit: needs Slurm's commands; `make slurm-up` starts a cluster on a Debian machine")
    if peers and importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError(
            "bench submit --peers: hydra-submitit-launcher is not here; pip install hydra-submitit-launcher"
        )
    sides = [_ours, _peer] if peers else [_ours]
    measured = [side(points) for _ in range(rounds) for side in sides]
    if as_json:
        print(json.dumps({"points": points, "rounds": [asdict(one) for one in measured]}))
    else:
        _show(points, measured)
    return EXIT_DONE


def _ours(points: int) -> Submitted:
    with tempfile.TemporaryDirectory(prefix="bench-submit-", dir=Path.cwd()) as folder:
        target = Path(folder) / "sweep"
        words = [sys.executable, "-m", "hpc_train", "submit", "-m", f"train.seed=range(0,{points})"]
        words += [f"run_dir={target}", "launch.name=bench-ours", f"+launch.extra.begin={_LATER}"]
        return _measure(OURS, words, "bench-ours", points, target)


def _peer(points: int) -> Submitted:
    with tempfile.TemporaryDirectory(prefix="bench-submit-", dir=Path.cwd()) as folder:
        application, target = Path(folder) / "application.py", Path(folder) / "sweep"
        application.write_text(_APP)
        words = [sys.executable, str(application), "-m", f"train.seed=range(0,{points})", f"hydra.sweep.dir={target}"]
        words += ["hydra/launcher=submitit_slurm", "hydra.launcher.name=bench-peer", "hydra.launcher.timeout_min=5"]
        words += [f"+hydra.launcher.additional_parameters.begin={_LATER}"]
        return _measure(PEER, words, "bench-peer", points, target)


def _measure(side: str, words: Sequence[str], name: str, points: int, target: Path) -> Submitted:
    """Run the command until Slurm has all its points; take them back, and the command if it waits for them."""
    began, spent = time.monotonic(), _children()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            words, env=client_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            _wait(process, lambda: _known(name) >= points)
            wall = time.monotonic() - began
            files = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
        except UserError as error:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"{side}: {error}: {' '.join(last)}") from None
        finally:
            ask(["scancel", f"--name={name}"])
            _end(process)
    return Submitted(side, wall, _children() - spent, len(files), sum(files) / 2**20)


def _wait(process: subprocess.Popen[bytes], there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not there():
        if process.poll():
            raise UserError(f"ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise UserError(f"not submitted within {_PATIENCE:g} s")
        time.sleep(0.2)


def _known(name: str) -> int:
    """Points of this name that Slurm knows: elements of arrays, each counted."""
    return len(ask(["squeue", "--noheader", "--array", f"--name={name}", "--format=%i"]).out.split())


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _children() -> float:
    """CPU seconds of processes that this one has waited for."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _show(points: int, measured: Sequence[Submitted]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a sweep of {points:,} points handed to Slurm, medians", box=None)
    for column in ("", "wall s", "CPU s", "files", "MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for side in dict.fromkeys(one.side for one in measured):
        mine = [one for one in measured if one.side == side]
        values = [
            statistics.median(one.wall_seconds for one in mine),
            statistics.median(one.cpu_seconds for one in mine),
            statistics.median(one.files for one in mine),
            statistics.median(one.mebibytes for one in mine),
        ]
        table.add_row(side, *(f"{value:,.2f}" for value in values))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
