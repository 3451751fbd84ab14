"""The dev cluster is a real Slurm: what the other tests in this folder rely on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_client import DEV_CLUSTER, SHAPE, SlurmCluster, dev_cluster, slurm_conf

NODES = ["node1", "node2", "node3", "node4"]
COUNT_STARTS = 'echo ${SLURM_RESTART_COUNT:-0} >> starts; [ -n "$SLURM_RESTART_COUNT" ] || sleep 300'


def test_srun_over_two_nodes_runs_on_two_hosts(slurm_cluster: SlurmCluster) -> None:
    hosts = slurm_cluster.srun("-N2", "-n4", "hostname")
    assert len(hosts) == 4
    assert len(set(hosts)) == 2
    assert set(hosts) <= set(NODES)


def test_nodes_share_files_but_not_memory(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    probe = (
        f"hostname > /dev/shm/probe; hostname > {tmp_path}/$(hostname); sleep 1; cat /dev/shm/probe; rm /dev/shm/probe"
    )
    assert slurm_cluster.srun("-N4", "-n4", "sh", "-c", probe) == NODES
    assert sorted(file.name for file in tmp_path.iterdir()) == NODES


def test_srun_starts_mpi_ranks(slurm_cluster: SlurmCluster) -> None:
    program = "from mpi4py.MPI import COMM_WORLD as c; print(c.rank, c.allreduce(1))"
    ranks = slurm_cluster.srun("-N2", "-n4", "--mpi=pmix", sys.executable, "-c", program)
    assert ranks == ["0 4", "1 4", "2 4", "3 4"]


def test_array_job_runs_every_index(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = slurm_cluster.sbatch(
        "--wait", "--array=0-4%2", "-D", str(tmp_path), "-o", "%a.log", "--wrap", "echo $SLURM_ARRAY_TASK_ID"
    )
    assert [(tmp_path / f"{index}.log").read_text() for index in range(5)] == [f"{index}\n" for index in range(5)]
    slurm_cluster.wait_for_sacct(job, ("JobID", "State"), [(f"{job}_{index}", "COMPLETED") for index in range(5)])


def test_accounting_keeps_the_exit_code(slurm_cluster: SlurmCluster) -> None:
    job = slurm_cluster.sbatch("-o", "/dev/null", "--wrap", "exit 7")
    slurm_cluster.wait_for_state(job, "FAILED")
    slurm_cluster.wait_for_sacct(job, ("State", "ExitCode"), [("FAILED", "7:0")])


def test_requeued_job_starts_again(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = running_counter(slurm_cluster, tmp_path)
    slurm_cluster.scontrol("requeue", job)
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=60)
    assert (tmp_path / "starts").read_text().split() == ["0", "1"]


@pytest.mark.long
def test_node_that_slurm_holds_for_down_requeues_its_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = running_counter(slurm_cluster, tmp_path, "-w", "node4")
    slurm_cluster.scontrol("update", "nodename=node4", "state=down", "reason=test")
    slurm_cluster.scontrol("update", f"jobid={job}", "reqnodelist=")
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout=60)
    slurm_cluster.wait_for_node("node4")
    slurm_cluster.wait_for_sacct(job, ("State",), [("NODE_FAIL",), ("COMPLETED",)])


@pytest.mark.long
def test_power_loss_requeues_the_job_elsewhere(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = running_counter(slurm_cluster, tmp_path, "-N2")
    lost = slurm_cluster.job(job)["BatchHost"]
    with slurm_cluster.powered_off(lost):
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=150)
        assert slurm_cluster.job(job)["BatchHost"] != lost
        assert (tmp_path / "starts").read_text().split() == ["0", "1"]
    slurm_cluster.wait_for_sacct(job, ("State",), [("NODE_FAIL",), ("COMPLETED",)])


def test_tasks_see_their_leaf_switch(slurm_cluster: SlurmCluster) -> None:
    seen = slurm_cluster.srun("-N4", "-n4", "printenv", "SLURM_TOPOLOGY_ADDR")
    assert seen == ["spine.leaf1.node1", "spine.leaf1.node2", "spine.leaf2.node3", "spine.leaf2.node4"]


def test_up_twice_changes_nothing(slurm_cluster: SlurmCluster) -> None:
    state = slurm_cluster.conf.parents[1] / "state.json"
    before = state.read_text()
    assert "already up" in slurm_cluster.dev_cluster("up", *SHAPE)
    assert state.read_text() == before


def test_up_in_another_shape_is_refused(slurm_cluster: SlurmCluster) -> None:
    refused = dev_cluster("up", "--nodes", "3")
    assert refused.returncode == 1
    assert "other options" in refused.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--nodes", "0"), "--nodes is 0"), (("--switches", "5"), "--switches is 5"), (("--gpu-type", "A B"), "'A B'")],
)
def test_bad_options_are_named(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    refused = dev_cluster("up", *options, directory=tmp_path)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    assert dev_cluster("down", directory=tmp_path).returncode == 1
    assert (tmp_path / "etc").exists()


def test_failed_up_leaves_nothing_behind(one_more_cluster: Path) -> None:
    failing = "mount --bind /bin/false /usr/sbin/slurmctld && exec "
    up = f"HPC_TRAIN_DEV_CLUSTER={one_more_cluster} {sys.executable} {DEV_CLUSTER} up --nodes 1 --no-accounting"
    failed = subprocess.run(["unshare", "-m", "sh", "-c", failing + "env " + up], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("dev-cluster: slurmctld")
    assert remains(one_more_cluster) == []


def test_interrupted_up_leaves_nothing_behind(one_more_cluster: Path) -> None:
    starting = start_up_to_slurmctld(one_more_cluster)
    starting.send_signal(signal.SIGTERM)
    assert starting.wait(60) == 130
    assert remains(one_more_cluster) == []


def test_down_clears_up_after_a_killed_up(one_more_cluster: Path) -> None:
    starting = start_up_to_slurmctld(one_more_cluster)
    starting.kill()
    starting.wait(60)
    assert remains(one_more_cluster) != []
    assert dev_cluster("down", directory=one_more_cluster).returncode == 0
    assert remains(one_more_cluster) == []


def test_cables_can_be_pulled_and_gpus_counted(one_more_cluster: Path) -> None:
    up = dev_cluster("up", "--nodes", "2", "--gpus-per-node", "2", "--no-accounting", directory=one_more_cluster)
    assert up.returncode == 0, up.stderr
    cluster = SlurmCluster(slurm_conf(one_more_cluster), one_more_cluster)
    assert cluster.srun("-N2", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES") == ["0,1", "0,1"]
    assert reaches(cluster, "node2")
    assert reaches(cluster, "node2-hsn")
    cluster.dev_cluster("net", "node2", "down")
    assert reaches(cluster, "node2")
    assert not reaches(cluster, "node2-hsn")
    cluster.dev_cluster("net", "node2", "up")
    assert reaches(cluster, "node2-hsn")
    cluster.dev_cluster("net", "node2", "rate", "50mbit")
    assert "rate 50Mbit" in cluster.dev_cluster("exec", "node2", "--", "tc", "qdisc", "show", "dev", "hsn0")
    cluster.dev_cluster("net", "node2", "loss", "100")
    assert not reaches(cluster, "node2-hsn")
    cluster.dev_cluster("net", "node2", "clear")
    cluster.dev_cluster("net", "leaf1", "delay", "1")
    assert reaches(cluster, "node2-hsn")


def running_counter(cluster: SlurmCluster, folder: Path, *words: str) -> str:
    """A job that notes every start in the file `starts` and ends by itself only at its second; returned running."""
    job = cluster.sbatch(*words, "-D", str(folder), "-o", "/dev/null", "--requeue", "--wrap", COUNT_STARTS)
    cluster.wait_for_state(job, "RUNNING")
    while not (folder / "starts").exists():
        time.sleep(0.05)
    return job


def start_up_to_slurmctld(directory: Path) -> subprocess.Popen[bytes]:
    """`up` in the background, returned once its slurmctld runs and while its nodes boot."""
    script = f"HPC_TRAIN_DEV_CLUSTER={directory} exec {sys.executable} {DEV_CLUSTER} up --nodes 8 --no-accounting"
    starting = subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL)
    while "slurmctld" not in recorded(directory):
        assert starting.poll() is None
        time.sleep(0.01)
    return starting


def recorded(directory: Path) -> dict[str, list[int]]:
    try:
        return json.loads((directory / "state.json").read_text())["processes"]
    except FileNotFoundError:
        return {}


def remains(directory: Path) -> list[str]:
    """Processes that log into the cluster's directory, as all of its own do, and its files other than logs."""
    outputs = {process.name: link_of(process / "fd/1") for process in Path("/proc").glob("[0-9]*")}
    alive = [f"process {pid}: {output}" for pid, output in outputs.items() if output.startswith(f"{directory}/")]
    return alive + [file.name for file in directory.iterdir() if file.name not in ("lock", "log")]


def link_of(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:
        return ""


def reaches(cluster: SlurmCluster, host: str) -> bool:
    """Whether slurmd's port on `host` answers node1."""
    connect = f"timeout 3 bash -c 'exec 3<>/dev/tcp/{host}/6818'"
    return not cluster.command("srun", "-w", "node1", "sh", "-c", f"{connect} 2>/dev/null || echo cut")


def test_a_path_too_long_for_slurms_sockets_is_refused(tmp_path: Path) -> None:
    said = dev_cluster("up", directory=tmp_path / ("x" * 80))
    assert said.returncode == 1
    assert said.stderr.endswith("too long a path for Slurm's sockets: set HPC_TRAIN_DEV_CLUSTER to a shorter one\n")


def test_the_last_lines_of_a_job_that_ended_as_it_should_not_are_shown(tmp_path: Path) -> None:
    output = tmp_path / "job.log"
    output.write_text("".join(f"line {number}\n" for number in range(100)))

    class OneFailedJob(SlurmCluster):
        def job(self, job_id: str) -> dict[str, str]:
            return {"JobId": job_id, "JobState": "FAILED", "StdOut": str(output)}

    with pytest.raises(AssertionError, match=r"job 7 ended FAILED, not \{'COMPLETED'\}") as failed:
        OneFailedJob(tmp_path / "slurm.conf").wait_for_state("7", "COMPLETED")
    assert "line 99" in str(failed.value)
    assert "line 9\n" not in str(failed.value)
    output.unlink()
    with pytest.raises(AssertionError, match=r"no output: .*No such file"):
        OneFailedJob(tmp_path / "slurm.conf").wait_for_state("7", "COMPLETED")
