"""The state directory, which holds everything of one cluster, and the record of the processes that belong to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .options import Options
from .processes import ClusterError, Process, signals_held, spawn, start_tick, tail

DEFAULT_DIRECTORY = Path("/var/lib/hpc_train-dev-cluster")
DIRECTORIES = ("run", "log", "etc/hooks", "slurmctld", "nodes", "local", "cgroup", "hooks.d")
TEMPORARY = ("run", "etc", "slurmctld", "nodes", "local", "cgroup", "hooks.d", "dev", "mysql")


class State:
    """The contents of `state.json`, which is rewritten at every change so that `down` also works after a crash.

    `network` numbers this cluster among those on the machine and fixes its addresses and ports.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.options = Options()
        self.network = 0
        self.processes: dict[str, Process] = {}
        if self._file.exists():
            saved = json.loads(self._file.read_text())
            self.options = Options(**saved["options"])
            self.network = saved["network"]
            self.processes = {name: Process(*pair) for name, pair in saved["processes"].items()}

    @property
    def _file(self) -> Path:
        return self.root / "state.json"

    @property
    def slurm_conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    def is_up(self) -> bool:
        return bool(self.processes)

    def save(self) -> None:
        saved = {
            "options": asdict(self.options),
            "network": self.network,
            "processes": {name: [process.pid, process.start] for name, process in self.processes.items()},
        }
        new = self.root / "state.new"
        new.write_text(json.dumps(saved, indent=1) + "\n")
        new.replace(self._file)

    def launch(self, name: str, command: Sequence[object], env: Mapping[str, str] | None = None) -> Process:
        """Start and record a daemon that logs to log/<name>.log."""
        with signals_held():
            return self.record(name, spawn(command, self.log(name), env))

    def record(self, name: str, pid: int) -> Process:
        start = start_tick(pid)
        if start is None:
            raise ClusterError(f"{name}: process {pid} exited at once{tail(self.log(name))}")
        self.processes[name] = Process(pid, start)
        self.save()
        return self.processes[name]

    def alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive()

    def dead(self) -> list[str]:
        return [name for name, process in self.processes.items() if not process.alive()]

    def stop(self, name: str, first: signal.Signals = signal.SIGTERM) -> None:
        if name in self.processes:
            self.processes[name].stop(first)
            del self.processes[name]
            self.save()

    def log(self, name: str) -> Path:
        return self.root / f"log/{name}.log"

    def client_environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.slurm_conf)}

    def prepare(self) -> None:
        """Make an empty directory tree for a new cluster; the logs of the previous one are removed."""
        shutil.rmtree(self.root / "log", ignore_errors=True)
        self.clean()
        for name in DIRECTORIES:
            (self.root / name).mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Remove all but the logs."""
        for name in TEMPORARY:
            shutil.rmtree(self.root / name, ignore_errors=True)
        self._file.unlink(missing_ok=True)
        self.network, self.processes = 0, {}


def default_directory() -> Path:
    return Path(os.environ.get("HPC_TRAIN_DEV_CLUSTER") or DEFAULT_DIRECTORY).absolute()


@contextlib.contextmanager
def locked(root: Path) -> Iterator[State]:
    """Hold the state of `root`, which one command at a time may do. Raises ClusterError for a directory that contains
    other things.
    """
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock_file = root / "lock"
    if not lock_file.exists() and any(root.iterdir()):
        raise ClusterError(f"{root} is not empty and no dev-cluster directory: name another in HPC_TRAIN_DEV_CLUSTER")
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield State(root)
