"""Ranks in an image of Charliecloud, for real: made of Debian's packages and this environment, on two nodes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from container_images import PYTHON
from slurm_client import SlurmCluster
from training_client import assert_same_result, hpc_train, kinds, steps_done, submit, tasks_of, wait_until

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
def test_ranks_in_an_image_stop_go_on_and_compute_the_same(
    slurm_cluster: SlurmCluster, container_image: Path, store: Path, tmp_path: Path
) -> None:
    assert shutil.which("ch-run"), "ch-run is not installed: apt-get install charliecloud"
    secret = Path.home() / f".witness-{os.getpid()}"
    settings = (
        "model=custom",
        "model.module=container_witness",
        "train.steps=400",
        "train.sequence_length=16",
        "train.global_batch=8",
        "checkpoint.every=100",
        "train.eval_every=0",
        f"data.path={store}",
        "data=text",
        "launch.export=[WITNESS_SECRET]",
    )
    env = {"WITNESS_SECRET": str(secret), "PYTHONPATH": str(HERE)}
    inside = ("container=charliecloud", f"container.image={container_image}", f"container.python={PYTHON}")
    run, reference = tmp_path / "inside", tmp_path / "outside"
    secret.touch()
    try:
        outside = submit(reference, *settings, "model.name=outside", **env)
        job = submit(run, *settings, *inside, "model.name=witness", **env)
        wait_until("20 steps", lambda: steps_done(run) >= 20, timeout=300)
        assert len(tasks_of(run)) == 2
        slurm_cluster.command("scancel", "--signal=USR2", job)
        slurm_cluster.wait_for_state(job, "PENDING", timeout=120)
        assert (run / f"checkpoints/step-{steps_done(run)}").is_dir()
        slurm_cluster.start_requeued_job(job)
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=300)
        slurm_cluster.wait_for_state(outside, "COMPLETED", timeout=300)
    finally:
        secret.unlink()
    assert [kind for kind in kinds(run) if kind in ("signal", "requeue", "resume", "end")] == [
        "signal",
        "requeue",
        "resume",
        "end",
    ]
    assert "done: 400 steps" in (run / "logs/1/task-0.log").read_text()
    assert_same_result(run, reference, 400)


def test_what_is_no_image_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "image.sif").touch()
    for image, line in (
        (str(tmp_path), "not the folder of an image, which has a folder usr"),
        (str(tmp_path / "image.sif"), "not the folder of an image"),
        ("docker://debian", "charliecloud does not take docker://; use a folder, such as ch-convert makes"),
        (str(tmp_path / "none"), "No such file"),
    ):
        asked = hpc_train(
            "submit", "--dry-run", "container=charliecloud", f"container.image={image}", f"run_dir={tmp_path}/run"
        )
        assert (asked.returncode, asked.stderr.count("\n")) == (2, 1)
        assert line in asked.stderr
