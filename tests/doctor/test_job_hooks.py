"""slurm/prolog and slurm/epilog as slurmd runs them: with its variables, on real files and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "slurm"
SOMEBODY = 61873
"""A uid that nobody here has."""
STUBBORN = """
import os, signal, sys, time
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(300)
"""


class Node:
    """Slurm's commands say what a test wants; what they are asked is kept."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.asked, self.shm = folder / "bin", folder / "asked", folder / "shm"
        self.bin.mkdir()
        self.shm.mkdir()
        self.asked.touch()
        self.command("scontrol", f'echo "$*" >>{self.asked}; echo "NodeName=n7 State=IDLE"')

    def command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(self, script: str, **settings: str) -> subprocess.CompletedProcess[str]:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(SOMEBODY), "SLURMD_NODENAME": "n7"}
        own = {"PROLOG_CONFIG": "/dev/null", "EPILOG_CONFIG": "/dev/null", "EPILOG_FOLDERS": str(self.shm)}
        env = {**os.environ, **job, **own, **settings, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.run([str(SLURM / script)], env=env, capture_output=True, text=True, check=False)

    @property
    def reason(self) -> str:
        """What the node was drained with; empty: it was not."""
        updates = [line for line in self.asked.read_text().splitlines() if line.startswith("update")]
        return updates[0].partition("Reason=")[2] if updates else ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def stray() -> Iterator[subprocess.Popen[str]]:
    """A process of somebody that ignores SIGTERM."""
    if os.geteuid():
        pytest.skip("needs root, as slurmd has it: another user's processes are ended")
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(SOMEBODY)], stdout=subprocess.PIPE, text=True, cwd="/"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def test_a_fit_node_is_let_alone(node: Node, tmp_path: Path) -> None:
    done = node.run("prolog", PROLOG_WRITE=f"{tmp_path} /dev/shm")
    assert (done.returncode, done.stderr, node.reason) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".prolog")] == []


def test_what_a_job_needs_and_does_not_get_drains_the_node(node: Node, tmp_path: Path) -> None:
    node.command("nvidia-smi", 'case $1 in --id=3) echo "Unable to determine" ;; *) echo "GPU-${1#--id=}" ;; esac')
    done = node.run("prolog", PROLOG_WRITE=str(tmp_path), SLURM_JOB_GPUS="0,1")
    assert (done.returncode, node.reason) == (0, "")
    wanted = {"PROLOG_WRITE": f"{tmp_path}/missing", "SLURM_JOB_GPUS": "1,3"}
    assert node.run("prolog", PROLOG_DRY_RUN="1", **wanted).returncode == 0
    assert node.reason == ""
    done = node.run("prolog", **wanted)
    assert done.returncode == 1
    assert node.reason == f"prolog of job 7: {tmp_path}/missing cannot be written; GPU 3 does not answer"
    assert done.stderr == f"n7: {node.reason}\n"


def test_a_reason_that_is_there_stays(node: Node, tmp_path: Path) -> None:
    node.command("scontrol", f'echo "$*" >>{node.asked}; echo "NodeName=n7 State=IDLE+DRAIN Reason=broken fan"')
    assert node.run("prolog", PROLOG_WRITE=f"{tmp_path}/missing").returncode == 1
    assert node.reason == ""


def test_what_a_job_left_is_removed(node: Node, stray: subprocess.Popen[str], tmp_path: Path) -> None:
    node.command("squeue", f'echo "$*" >>{node.asked}; echo 7')
    (tmp_path / "precious").write_text("x")
    theirs = [node.shm / name for name in ("hpc_train-image-a b", "psm_1", "-rf", "hpc_train-folder", "hpc_train-link")]
    for path in theirs[:3]:
        path.touch()
    (theirs[3] / "deep").mkdir(parents=True)
    theirs[4].symlink_to(tmp_path / "precious")
    others = [node.shm / "other", node.shm / "hpc_train-of-root"]
    for path in others:
        path.touch()
    for path in (*theirs, others[0]):
        os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    dry = node.run("epilog", EPILOG_DRY_RUN="1")
    assert f"would remove {theirs[0]}" in dry.stderr
    assert stray.poll() is None
    done = node.run("epilog")
    assert done.returncode == 0, done.stderr
    assert stray.wait(timeout=10) == -9
    assert "KILL to " in done.stderr
    assert {path.name for path in node.shm.iterdir()} == {"-rf", "other", "hpc_train-of-root"}
    assert (tmp_path / "precious").read_text() == "x"
    assert node.reason == ""
    assert f"--user={SOMEBODY} --nodelist=n7" in node.asked.read_text()


@pytest.mark.parametrize("answer", ["echo 7; echo 8", "exit 1"])
def test_where_the_user_has_or_may_have_another_job_nothing_is_touched(
    node: Node, stray: subprocess.Popen[str], answer: str
) -> None:
    node.command("squeue", answer)
    (node.shm / "hpc_train-x").touch()
    os.chown(node.shm / "hpc_train-x", SOMEBODY, SOMEBODY)
    assert node.run("epilog").returncode == 0
    assert stray.poll() is None
    assert (node.shm / "hpc_train-x").exists()


def test_users_of_the_system_are_never_touched(node: Node, stray: subprocess.Popen[str]) -> None:
    node.command("squeue", "echo 7")
    for uid in ("0", "", "root", f"{SOMEBODY} 0"):
        assert node.run("epilog", SLURM_JOB_UID=uid).returncode == 0
    assert node.run("epilog", EPILOG_FIRST_UID=str(SOMEBODY + 1)).returncode == 0
    assert stray.poll() is None
