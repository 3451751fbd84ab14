"""A training loop of one's own on Slurm: Preemption stops it, the batch script of docs/parts.md requeues it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from slurm_client import SlurmCluster

LOOP = """
import os
import sys
import time
from pathlib import Path

import torch

import hpc_train

STEPS = 30
folder = Path(sys.argv[1])
world = hpc_train.init()
model = torch.nn.Linear(1, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with hpc_train.Checkpointer(folder / "checkpoints") as checkpointer, hpc_train.Preemption() as preemption:
    loaded = checkpointer.load_latest(model=model, optimizer=optimizer)
    first = loaded.step if loaded else 0
    for step in range(first, STEPS):
        (-(step + 1) * model.weight.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            with (folder / "steps").open("a") as file:
                print(os.environ.get("SLURM_RESTART_COUNT", "0"), step + 1, model.weight.item(), file=file)
        time.sleep(0.3 if first == 0 else 0.01)
        if preemption.should_stop():
            checkpointer.save(step + 1, model=model, optimizer=optimizer)
            preemption.requeue()
"""
SCRIPT = """#!/bin/bash
#SBATCH --requeue --open-mode=append
srun {python} loop.py {folder}
[ $? -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
"""
"""The lines of docs/parts.md."""


def read_steps(folder: Path) -> list[list[float]]:
    """Attempt, step and weight of each step that rank 0 has finished."""
    file = folder / "steps"
    return [[float(word) for word in line.split()] for line in file.read_text().splitlines()] if file.exists() else []


def test_a_loop_stops_on_a_signal_is_requeued_and_goes_on(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "job.sh").write_text(SCRIPT.format(python=sys.executable, folder=tmp_path))
    output = tmp_path / "out"
    words = ["--nodes=2", "--ntasks=2", f"--output={output}", f"--chdir={tmp_path}"]
    job = slurm_cluster.sbatch(*words, str(tmp_path / "job.sh"))
    end = time.monotonic() + 120
    while len(read_steps(tmp_path)) < 4:
        assert time.monotonic() < end, output.read_text() if output.exists() else "no output"
        time.sleep(0.1)
    slurm_cluster.command("scancel", "--signal=USR1", job)  # to the ranks; the batch script does not get the signal
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=180)
    rows = read_steps(tmp_path)
    assert [row[1] for row in rows] == list(range(1, 31)), "no step is lost, and none is made twice"
    assert [row[2] for row in rows] == [step * (step + 1) / 2 for step in range(1, 31)]
    attempts = [row[0] for row in rows]
    assert (attempts[0], attempts[-1], attempts == sorted(attempts)) == (0, 1, True)
    assert slurm_cluster.job(job)["Restarts"] == "1"
