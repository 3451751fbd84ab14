"""A Hydra application for tests, whose points do what their configuration says, launched as sweepers do it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig
from packaging.version import Version

CONF = """
do: value
x: 1.0
place: ???
variable: ${oc.env:NAMED_IN_THE_CONFIGURATION,none}
"""
PATIENCE = 60.0


class Picky(Exception):
    """An exception that cannot be made from its message, like many exceptions of libraries."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def rank() -> int:
    return int(os.environ.get("SUBMITIT_LOCAL_GLOBALID", os.environ.get("SLURM_PROCID", "0")))


def task(config: DictConfig) -> Any:
    """The task function of the application."""
    return ACTIONS[config.do](config, Path(config.place))


def _seen(config: DictConfig, place: Path) -> dict[str, Any]:
    ours = ("MY_SECRET", "NAMED_IN_THE_CONFIGURATION", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return {"x": config.x, "variable": config.variable, "env": {name: os.environ.get(name) for name in ours}}


def _raise(config: DictConfig, place: Path) -> None:
    raise Picky(3, 4)


def _once(config: DictConfig, place: Path) -> int:
    """Wait to be stopped in the first run of the point; return the number of runs in the second."""
    runs = place / f"runs-{config.x}-{rank()}"
    with runs.open("a") as file:
        file.write(f"{os.getpid()}\n")
    count = len(runs.read_text().splitlines())
    if count == 1:
        _hold(config, place)
    return count


def _hold(config: DictConfig, place: Path) -> None:
    """Wait for a signal."""
    (place / f"holds-{config.x}").write_text(str(os.getpid()))
    time.sleep(PATIENCE)
    raise TimeoutError("nobody sent a signal")


def _kill_job(config: DictConfig, place: Path) -> None:
    """Send SIGKILL to everything of the job, its batch script first, so that nothing is left to report it."""
    job = f"SLURM_JOB_ID={os.environ['SLURM_JOB_ID']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (process / "cmdline").read_bytes(), (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if job in environ and b"slurmstepd" not in command and int(process.name) != os.getpid():
            found.append((b"slurm_script" not in command, int(process.name)))
    for _, number in sorted(found):
        os.kill(number, signal.SIGKILL)
    _kill(config, place)


def _kill(config: DictConfig, place: Path) -> None:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _eat(config: DictConfig, place: Path) -> None:
    """Allocate more memory than there is."""
    eaten = [bytearray(b"x") * (1 << 26) for _ in range(1 << 10)]
    raise MemoryError(f"nothing bounds this process, which has {len(eaten)} blocks")


def _count(config: DictConfig, place: Path) -> int:
    """Return how many points are running; the first two wait for one another."""
    mine = place / f"runs-now-{config.x}"
    mine.touch()
    while config.x < 2 and not {place / "runs-now-0", place / "runs-now-1"} <= set(place.glob("runs-now-*")):
        time.sleep(0.01)
    now = len(list(place.glob("runs-now-*")))
    if config.x < 2:  # nobody leaves before both have counted
        (place / f"counted-{config.x}").touch()
        while len(list(place.glob("counted-*"))) < 2:
            time.sleep(0.01)
    mine.unlink()
    return now


def _edit(config: DictConfig, place: Path) -> float:
    """Edit the file that the next point would read."""
    (place / "conf/config.yaml").write_text(CONF.replace("x: 1.0", "x: 999.0"))
    return float(config.x)


def _warn(config: DictConfig, place: Path) -> None:
    """Warn as a rank of a training does, whose warnings are in its run directory."""
    from hpc_train.training.records.warning_files import WarningRecorder

    logs = Path(HydraConfig.get().runtime.output_dir) / "run" / "logs" / "0"
    logs.mkdir(parents=True)
    WarningRecorder(logs, rank()).emit(
        logging.LogRecord("hpc_train.models", logging.WARNING, __file__, 1, "has seen something", None, None)
    )


def _only_first_ends_well(config: DictConfig, place: Path) -> int:
    if rank() == 1:
        raise Picky(5, 6)
    return rank()


ACTIONS = {
    "value": lambda config, place: config.x**2,
    "seen": _seen,
    "raise": _raise,
    "exit": lambda config, place: sys.exit(3),
    "kill": _kill,
    "kill_job": _kill_job,
    "lambda": lambda config, place: lambda: 1,
    "thread": lambda config, place: __import__("threading").Lock(),
    "once": _once,
    "hold": _hold,
    "eat": _eat,
    "count": _count,
    "edit": _edit,
    "warn": _warn,
    "rank": lambda config, place: rank(),
    "rank_1_raises": _only_first_ends_well,
}


@dataclass(frozen=True)
class Sweeping:
    """The directory of an application and its outputs."""

    place: Path

    @property
    def sweep(self) -> Path:
        return self.place / "sweep"

    @property
    def folder(self) -> Path:
        """Return the folder with calls, results and logs."""
        return self.sweep / ".submitit"

    def launch(self, launcher: str, settings: Sequence[str], *points: Sequence[str], first: int = 0) -> list[JobReturn]:
        """Launch these points as a sweeper does and return their returns. Settings of the launcher are given without
        its prefix.
        """
        conf = self.place / "conf"
        conf.mkdir(exist_ok=True)
        if not (conf / "config.yaml").exists():
            (conf / "config.yaml").write_text(CONF)
        words = [f"hydra.launcher.{word}" if word[0] != "+" else f"+hydra.launcher.{word[1:]}" for word in settings]
        base = [f"hydra/launcher={launcher}", f"hydra.sweep.dir={self.sweep}", "hydra.job.name=app", *words]
        with initialize_config_dir(str(conf), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            config = hydra.compose_config("config", [*base, f"place={self.place}"], run_mode=RunMode.MULTIRUN)
            context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks())
            launcher = Plugins.instance().instantiate_launcher(context, task, config)
            shared = [f"place={self.place}"]
            return list(launcher.launch([[*shared, *point] for point in points], initial_job_idx=first))


@contextmanager
def as_in_hydras_own_tests() -> Iterator[None]:
    """Set the version_base that Hydra's test suites assume; every composition of ours sets another one."""
    before = VersionBase.instance().getbase()
    VersionBase.instance().setbase(Version("1.1"))
    try:
        yield
    finally:
        VersionBase.instance().version_base = before


def value(returned: JobReturn) -> Any:
    """Return what a point returned, or its exception if it failed."""
    assert returned.status is not JobStatus.UNKNOWN
    return returned._return_value


def wait_for(path: Path) -> str:
    """Return the content of a file as soon as it has some."""
    deadline = time.monotonic() + PATIENCE
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()
