"""Ranks in containers of Podman, for real: a job of a user who is not root, on nodes that track jobs by cgroups."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from container_images import PYTHON, make_outside_environment
from slurm_client import SlurmCluster, dev_cluster, slurm_conf
from training_client import RANKS, assert_same_result, hpc_train, kinds, steps_done, wait_until

USER = "games"
SHAPE = ("--nodes", "4", "--cpus-per-node", "8", "--cgroup", "--no-accounting", "--subids", USER)
CONTROLLER = Path("/sys/fs/cgroup/freezer")
CGROUPS = ("freezer", "memory", "devices")


@dataclass(frozen=True)
class Submitter:
    """A user with a home, a working folder, and a Python outside of the image."""

    folder: Path
    image: Path
    cluster: SlurmCluster

    def submit(self, run: Path, *overrides: str) -> str:
        """Submit a run as training_client.submit does; returns the job id."""
        entry = pwd.getpwnam(USER)
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": f"{self.folder}/home",
            "SLURM_CONF": str(self.cluster.conf),
            "PYTHONPATH": f"{self.folder}/project",
            "WITNESS_SECRET": f"{self.folder}/home/secret",
        }
        words = [f"{self.folder}/env/bin/python", "-m", "hpc_train", "submit", "--json", *RANKS, f"run_dir={run}"]
        said = subprocess.run(
            [*words, "launch.time_minutes=10", *overrides],
            env=environment,
            cwd=self.folder / "project",
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert said.returncode == 0, said.stderr
        return str(json.loads(said.stdout)["job_id"])

    def inside(self, runtime: str) -> tuple[str, ...]:
        image = (f"container.image={self.image}", f"container.python={PYTHON}")
        return ("container=podman", f"container.runtime={runtime}", *image, "model.name=witness")


@pytest.fixture
def submitter(one_more_cluster: Path, container_image: Path, store: Path) -> Iterator[Submitter]:
    for tool in ("podman", "crun", "runc", "newuidmap"):
        assert shutil.which(tool), f"{tool} is not installed: apt-get install podman crun runc uidmap"
    if not os.access(CONTROLLER, os.W_OK):
        pytest.skip("dev-cluster --cgroup needs the controllers of cgroup v1, mounted and writable")
    one_more_cluster.parent.chmod(0o755)  # the user reads slurm.conf
    up = dev_cluster("up", *SHAPE, directory=one_more_cluster)
    assert up.returncode == 0, up.stderr
    # Not below /tmp, which is that of the node in a container.
    with tempfile.TemporaryDirectory(prefix="user-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        make_outside_environment(container_image, folder / "env")
        for made in ("home", "project", "runs"):
            (folder / made).mkdir()
        (folder / "home/secret").touch()
        shutil.copy(Path(__file__).with_name("container_witness.py"), folder / "project")
        shutil.copy(store, folder / "text.h5")
        subprocess.run(["chown", "-R", f"{USER}:", str(folder)], check=True)
        # Files may be links to those of this environment, folders are not.
        owned = ["find", str(container_image), "-type", "d", "-exec", "chown", f"{USER}:", "{}", "+"]
        subprocess.run(owned, check=True)
        yield Submitter(folder, container_image, SlurmCluster(slurm_conf(one_more_cluster), one_more_cluster))
        # What the last job has left still writes to the user's home.
        down = dev_cluster("down", directory=one_more_cluster)
        assert down.returncode == 0, down.stderr
        wait_until("the end of the user's processes", lambda: not list_processes(USER), timeout=60)


def list_processes(user: str) -> list[Path]:
    """List the processes of a user in /proc; they may have ended since."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [process] * (process.owner() == user)
    return found


def ranks_of(run: Path) -> dict[int, int]:
    """Return rank -> process id on this machine, of the processes in the containers."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == PYTHON.encode() and str(run).encode() in words:
            rank = next(item for item in variables if item.startswith(b"SLURM_PROCID="))
            found[int(rank.partition(b"=")[2])] = int(process.name)
    return found


def cgroups_of(process: int) -> dict[str, str]:
    lines = [line.split(":") for line in Path(f"/proc/{process}/cgroup").read_text().splitlines()]
    return {controller: group for _, controller, group in lines if controller in CGROUPS}


def list_stores() -> list[Path]:
    return [path for path in Path("/tmp").glob("hpc_train-podman-*") if path.owner() == USER]


@pytest.mark.timeout(900)
def test_ranks_in_containers_stop_go_on_and_end_with_their_job(submitter: Submitter) -> None:
    folder, cluster = submitter.folder, submitter.cluster
    settings = (
        "model=custom",
        "model.module=container_witness",
        "train.steps=200",
        "train.sequence_length=16",
        "train.global_batch=8",
        "checkpoint.every=100",
        "train.eval_every=0",
        f"data.path={folder}/text.h5",
        "data=text",
        "launch.export=[WITNESS_SECRET]",
    )
    run, reference, killed = folder / "runs/inside", folder / "runs/outside", folder / "runs/killed"
    outside = submitter.submit(reference, *settings, "model.name=outside")
    job = submitter.submit(run, *settings, *submitter.inside("crun"))
    wait_until("20 steps", lambda: steps_done(run) >= 20, timeout=300)
    ranks = ranks_of(run)
    assert sorted(ranks) == [0, 1]
    for node, process in enumerate(ranks.values(), 1):
        groups = cgroups_of(process)
        assert set(groups) == set(CGROUPS)
        # Slurm looks for the processes of a step in these groups alone, not in those below them.
        assert all(group.split("/")[-1].startswith(("step_", "task_")) for group in groups.values()), (node, groups)
    cluster.command("scancel", "--signal=USR2", job)
    cluster.wait_for_state(job, "PENDING", timeout=120)
    assert (run / f"checkpoints/step-{steps_done(run)}").is_dir()
    cluster.start_requeued_job(job)
    cluster.wait_for_state(job, "COMPLETED", timeout=300)
    cluster.wait_for_state(outside, "COMPLETED", timeout=300)
    seen = [kind for kind in kinds(run) if kind in ("signal", "requeue", "resume", "end")]
    assert seen == ["signal", "requeue", "resume", "end"]
    assert "done: 200 steps" in (run / "logs/1/task-0.log").read_text()
    assert_same_result(run, reference, 200)
    assert list_stores() == []

    job = submitter.submit(killed, *settings, *submitter.inside("runc"))
    wait_until("the ranks of the other runtime", lambda: len(ranks_of(killed)) == 2, timeout=120)
    processes = list(ranks_of(killed).values())
    cluster.command("scancel", job)
    cluster.command("scancel", f"--signal={signal.SIGKILL.name.removeprefix('SIG')}", job, check=False)
    wait_until("the end of the containers", lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 60)


def test_what_is_no_image_for_podman_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "image.sif").touch()
    for words, line in (
        ((), "container.image: is not set; container=podman needs the folder of an image (podman export)"),
        ((f"container.image={tmp_path}/image.sif",), "not the folder of an image, which has a folder usr"),
        (("container.image=docker://debian",), "podman does not take docker://; use a folder, such as podman export"),
        ((f"container.image={tmp_path}/none",), "No such file; give a folder that the nodes see"),
        ((f"container.image={tmp_path}", "container.runtime=kata"), "container.runtime"),
    ):
        asked = hpc_train("submit", "--dry-run", "container=podman", *words, f"run_dir={tmp_path}/run")
        assert (asked.returncode, asked.stderr.count("\n")) == (2, 1)
        assert line in asked.stderr
