"""slurm/job-script, the template for batch scripts of one's own, on a real Slurm."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from slurm_client import FINAL, SlurmCluster

SCRIPT = Path(__file__).resolve().parents[2] / "slurm/job-script"
TINY = [
    *("data=digits", "model=vit_tiny", "model.layers=1", "model.hidden=16", "model.heads=2", "train.global_batch=4"),
    "train.micro_batch=2",
    *("train.eval_every=0", "train.tensorboard=false", "train.noise_scale.every=0", "checkpoint.every=100000"),
]


def sbatch(cluster: SlurmCluster, folder: Path, *words: str) -> str:
    """On two nodes."""
    options = ["--nodes=2", "--ntasks-per-node=1", "--time=5", f"--chdir={folder}", f"--output={folder}/log"]
    return cluster.sbatch(*options, str(SCRIPT), *TINY, *words)


def test_it_trains_is_requeued_when_told_to_stop_and_wants_a_run_directory(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAIN", str(Path(sys.executable).with_name("hpc-train")))
    run = tmp_path / "run"
    other = sbatch(slurm_cluster, tmp_path, "train.steps=2")
    slurm_cluster.wait_for_state(other, "FAILED")
    assert slurm_cluster.job(other)["ExitCode"] == "2:0"
    assert (tmp_path / "log").read_text().startswith("give run_dir=")
    job = sbatch(slurm_cluster, tmp_path, f"run_dir={run}", "train.steps=100000")
    end = time.monotonic() + 90
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        ended = slurm_cluster.job_state(job) in FINAL
        assert not ended, (tmp_path / "log").read_text()
        assert time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.2)
    slurm_cluster.command("scancel", "--signal=USR2", job)
    slurm_cluster.wait_for_state(job, "PENDING", timeout=60)
    assert slurm_cluster.job(job)["Restarts"] == "1"
    slurm_cluster.scancel(job)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    stopped = next(event for event in events if event["event"] == "signal")
    assert (run / f"checkpoints/step-{stopped['step']}").is_dir()
    assert len(json.loads((run / "rankmap.json").read_text())["ranks"]) == 2
