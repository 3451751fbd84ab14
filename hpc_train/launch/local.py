"""The local pool: ranks on this machine, through submitit's local executor."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from submitit.local.local import LocalExecutor, LocalJob

from hpc_train.config.run import RunConfig
from hpc_train.launch.share import SHARE
from hpc_train.launch.state.attempts import mark_begun
from hpc_train.launch.task import ATTEMPT_VARIABLE
from hpc_train.launch.task import main as run_task
from hpc_train.runtime.rendezvous import FOLDER_VARIABLE
from hpc_train.runtime.stop import held_back
from hpc_train.training.folder import RunFolder, make_submitit, private_files


class PoolExecutor(LocalExecutor):
    """submitit's local executor with our controller and our task entry."""

    def __init__(self, folder: RunFolder, attempt: int, ranks: int, threads: int, env: Mapping[str, str]) -> None:
        super().__init__(folder.submitit)
        self._run, self._attempt, self._ranks, self._threads = folder, attempt, ranks, threads
        self._env = env
        self.update_parameters(tasks_per_node=ranks)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([sys.executable, "-u", "-m", "hpc_train.launch.task", str(self._run.path)])

    def _submit_command(self, command: str) -> LocalJob[Any]:
        logs = self._run.logs(self._attempt)
        arguments = [str(self._run.submitit), str(logs), str(os.getpid())]
        with held_back():
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_train.launch.controller", *arguments],
                env=self._environment(command, logs),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the launcher, which turns it into a stop that saves
            )
        mark_begun(logs, "local", process.pid)
        return LocalJob(self.folder, str(process.pid), tasks=list(range(self._ranks)), process=process)

    def _environment(self, command: str, logs: Path) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != SHARE},
            **self._env,
            "SUBMITIT_LOCAL_NTASKS": str(self._ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": "0",
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_EXECUTOR": "local",
            "OMP_NUM_THREADS": str(self._threads),
            ATTEMPT_VARIABLE: str(self._attempt),
            FOLDER_VARIABLE: str(logs),
        }


def start_pool(
    folder: RunFolder, attempt: int, ranks: int, threads: int, env: Mapping[str, str] | None = None
) -> LocalJob[int]:
    """Start the ranks of the job whose spec is in `folder`; returns at once. env: more variables for them."""
    executor = PoolExecutor(folder, attempt, ranks, threads, env or {})
    with private_files():
        make_submitit(folder)
        return cast("LocalJob[int]", executor.submit(run_task, str(folder.path)))


def local_ranks(config: RunConfig) -> int:
    """launch.ranks, else one a GPU of this machine, else 2."""
    if config.launch.ranks is not None:
        return config.launch.ranks
    return gpus_here() or 2


def threads_of(config: RunConfig, ranks: int) -> int:
    """launch.threads, else the cores this process may use, shared out evenly."""
    return config.launch.threads or max(1, len(os.sched_getaffinity(0)) // ranks)


def gpus_here() -> int:
    """Of this machine, as torch counts them."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        return 0
    import torch  # only where there may be a GPU: it takes a second

    return torch.cuda.device_count()
