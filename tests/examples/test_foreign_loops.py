"""The loops in examples/: killed with SIGKILL at any moment, started again, and equal to one that never stopped.

Takes minutes in all, because each case starts a program of another library three times; one is drawn.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import draw

from hpc_train.checkpoint import list_committed_steps, load_step, verify_step
from hpc_train.checkpoint.storage.step_selection import open_step
from hpc_train.interfaces import TensorShard

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = ("fsdp2_loop", "gan_loop", "accelerate_loop", "lightning_trainer", "transformers_trainer")
MAX_LINES = 15
STEPS = 30


def command(loop: str, ranks: int, directory: Path) -> list[str]:
    """How a user starts the loop."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks else []
    return [sys.executable, *launcher, str(EXAMPLES / f"{loop}.py"), "--dir", str(directory), "--steps", str(STEPS)]


def start(loop: str, ranks: int, directory: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    words = command(loop, ranks, directory)
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def run(loop: str, ranks: int, directory: Path) -> None:
    process = start(loop, ranks, directory)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert f"done: step {STEPS}" in out


def kill_after(loop: str, ranks: int, directory: Path, step: int) -> None:
    """Start the loop and kill all its processes once `step` is committed."""
    process = start(loop, ranks, directory)
    try:
        while process.poll() is None and not any(done >= step for done in list_committed_steps(directory)):
            time.sleep(0.005)
        assert process.poll() is None, process.communicate()[1]
    finally:
        for victim in (*list_descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        process.communicate()


def list_descendants(process: int) -> list[int]:
    """Children of a process and theirs: torchrun's ranks are in sessions of their own."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [pid for child in map(int, children) for pid in (*list_descendants(child), child)]


def read_all(directory: Path, step: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Every tensor of a step, parameters and optimizer state, whole."""
    tensors = open_step(directory, step).manifest.step_layout.tensors
    targets = {tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in tensors}
    shards = [TensorShard(name, tuple(t.shape), t.dtype, (0,) * t.ndim, t) for name, t in targets.items()]
    load_step(directory, step, shards, None)
    return {shard.name: shard.local.numpy() for shard in shards}


@pytest.mark.parametrize("loop", LOOPS)
def test_few_lines_are_changed(loop: str) -> None:
    lines = [line for line in (EXAMPLES / f"{loop}.py").read_text().splitlines() if line.endswith("# hpc_train")]
    assert 0 < len(lines) < MAX_LINES


CASES = [
    ("fsdp2_loop", 2),
    ("gan_loop", 0),
    ("gan_loop", 2),
    ("accelerate_loop", 0),
    ("lightning_trainer", 0),
    ("transformers_trainer", 0),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", draw(CASES, CASES[:1]))
def test_killed_at_a_random_step_and_started_again(tmp_path: Path, case: tuple[str, int]) -> None:
    loop, ranks = case
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(loop, ranks, whole)
    kill_after(loop, ranks, broken, step=random.randint(1, STEPS - 10))
    assert max(list_committed_steps(broken)) < STEPS
    run(loop, ranks, broken)
    assert verify_step(broken, STEPS) == []
    expected, found = read_all(whole, STEPS), read_all(broken, STEPS)
    assert expected.keys() == found.keys()
    assert any(name.startswith("optim.") for name in expected)
    for name, values in expected.items():
        assert np.array_equal(values, found[name]), name


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [("fsdp2_loop", 2, 3), ("fsdp2_loop", 3, 1), ("accelerate_loop", 2, 3)], ids=str)
def test_goes_on_at_another_number_of_ranks(tmp_path: Path, case: tuple[str, int, int]) -> None:
    """Sums over other ranks round differently, so the result is equal up to float64's rounding."""
    loop, before, after = case
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(loop, before, whole)
    kill_after(loop, before, broken, step=random.randint(1, STEPS - 10))
    run(loop, after, broken)
    found = read_all(broken, STEPS)
    for name, values in read_all(whole, STEPS).items():
        np.testing.assert_allclose(values, found[name], rtol=1e-7, atol=1e-9, err_msg=name)
