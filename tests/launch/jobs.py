"""Start real jobs as a user does, look at their processes, and read the files that they leave."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.checkpoint import load_step
from hpc_train.checkpoint.convert.tensor_sources import make_blank_shard
from hpc_train.checkpoint.storage.step_directory import try_read_manifest
from hpc_train.training.records.run_records import read_metrics

HERE = Path(__file__).parent
PYTHON_PATH = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
PATIENCE = 120.0
"""Seconds after which a test gives up on what should happen at once."""
LAUNCHERS = re.compile(r"SLURM|PMI|OMPI|MPI_|SUBMITIT|TORCHELASTIC|RANK$|WORLD_SIZE|LOCAL_|MASTER_|HPC_TRAIN_")
COMMAND = (str(Path(sys.executable).with_name("hpc-train")), "train")
TINY = (
    "train.sequence_length=16",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.eval_every=0",
    "train.noise_scale.every=0",
    "train.tensorboard=false",
    "train.log_every=1",
    "launch.ranks=2",
    "launch.threads=1",
    "launch.timeout_seconds=120",
)
FAULTY = ("model=custom", "model.module=faulty_model", "model.name=faulty")
LONG = (*FAULTY, "train.steps=12", "train.eval_every=3", "train.eval_batches=2", "checkpoint.every=4")
"""The run that tests interrupt: dropout, validation and several checkpoints."""

ALONE = ("launch.ranks=1", "train.micro_batch=4")
"""On one rank, with the same number of micro-batches: for what one rank shows as well, since each imports torch."""


@dataclass(frozen=True)
class Process:
    """A process of a job as /proc shows it."""

    pid: int
    command: str
    task: int | None
    """Index, if it is a task of the local pool."""

    @property
    def is_controller(self) -> bool:
        return "hpc_train.launch.local.controller" in self.command

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Job:
    """A command that is running."""

    run_dir: Path
    popen: subprocess.Popen[str]

    def ended(self) -> Ended:
        out, err = self.popen.communicate(timeout=PATIENCE)
        return Ended(self.popen.returncode, out, err)

    def controller(self) -> Process:
        """Return the controller as soon as it is there."""
        return wait_for(lambda: next((p for p in processes(self.run_dir) if p.is_controller), None), self)

    def task(self, index: int) -> Process:
        """Return a task as soon as it is there."""
        return wait_for(lambda: next((p for p in processes(self.run_dir) if p.task == index), None), self)


@dataclass
class Workshop:
    """Starts a test's jobs in a directory of their own, sets faults, and knows the text that they train on."""

    folder: Path
    store: Path

    def start(self, name: str, *overrides: str, faults: str = "", command: Sequence[str] = COMMAND, **env: str) -> Job:
        """Begin to train in run directory `name`. Of two overrides of one setting the later one wins."""
        run_dir = self.folder / name
        clean = {key: value for key, value in os.environ.items() if not LAUNCHERS.search(key)}
        settings = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
        settings |= {"FAULTS": faults, "FAULT_FOLDER": str(self.folder)}
        text = () if {"data=digits", "data=custom"} & {*overrides} else ("data=text", f"data.path={self.store}")
        words = (*command, f"run_dir={run_dir}", *text, *TINY, *overrides)
        popen = subprocess.Popen(
            words,
            env=clean | settings | env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return Job(run_dir, popen)

    def train(self, name: str, *overrides: str, **settings: Any) -> Ended:
        """Train to the end."""
        return self.start(name, *overrides, **settings).ended()

    def wait_for_fault(self, fault: str, job: Job) -> None:
        """Return when a rank has reached the moment of a fault."""
        wait_for(lambda: (self.folder / fault).exists(), job)

    def go(self) -> None:
        """Let a rank that holds continue."""
        (self.folder / "go").touch()

    def clean(self) -> None:
        """End whatever is left of any job."""
        for process in processes(self.folder):
            with contextlib.suppress(ProcessLookupError):
                process.send(signal.SIGKILL)


def wait_for(look: Callable[[], Any], job: Job | None = None) -> Any:
    """Return what `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen"
        assert job is None or job.popen.poll() is None, f"the job ended before it happened: {job.ended()}"
        time.sleep(0.03)  # a look at all processes takes some milliseconds of a core
    return found


def processes(folder: Path) -> list[Process]:
    """Return the live processes that name a folder, or something in it, on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if entry.name.isdigit() and str(folder) in command:
                environment = dict(
                    item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item
                )
                index = (
                    environment.get("SUBMITIT_LOCAL_GLOBALID")
                    if "hpc_train.launch.rank_entrypoint" in command
                    else None
                )
                # Between fork and exec a task still has the command line of the controller.
                found.append(Process(int(entry.name), command, int(index) if index else None))
    return found


def numbers(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return the results in metrics.jsonl, without measured times: a tuple per step."""
    return [
        (r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"], r.get("validation_loss", 0.0))
        for r in read_metrics(run_dir / "metrics.jsonl")
    ]


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps of committed checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def parameters(run_dir: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return all tensors of the last checkpoint, whole."""
    directory, step = run_dir / "checkpoints", saved_steps(run_dir)[-1]
    manifest = try_read_manifest(directory / f"step-{step}", step)
    assert manifest is not None
    pieces = [make_blank_shard(tensor, tensor.rectangle) for tensor in manifest.step_layout.tensors]
    load_step(directory, step, pieces, None)
    return {piece.name: piece.local.numpy() for piece in pieces}


def assert_same_run(one: Path, other: Path) -> None:
    """Check that two runs have the same metrics and the same bits in the last checkpoint."""
    assert numbers(one) == numbers(other)
    left, right = parameters(one), parameters(other)
    assert left.keys() == right.keys()
    assert any("out.weight" in name for name in left)
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []
