"""Hydra's own test suites for launchers on a real Slurm, and problems that users of other launchers report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite
from slurm_client import SlurmCluster, dev_cluster, slurm_conf

APPLICATION = Path(__file__).parents[1] / "hydra_launchers"
sys.path.append(str(APPLICATION))
from optuna_application import tried  # noqa: E402
from sweeping import CONF, Sweeping, as_in_hydras_own_tests, value, wait_for  # noqa: E402

QUIET = ["-m", "hydra/hydra_logging=disabled", "hydra/job_logging=disabled"]
NAMES = ("app", "a_module", "no_config", "with_config", "task", "overridden_name", "name_from_config_file")
LIMITS = ["time_minutes=5", "signal_seconds=10"]
SHORT = [f"hydra.launcher.{word}" for word in LIMITS]


@pytest.fixture(autouse=True, scope="module")
def _no_job_outlives_its_tests(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 30
    while (left := slurm_cluster.squeue("-o", "%i", f"--name={','.join(NAMES)}")) and time.monotonic() < deadline:
        time.sleep(0.2)
    for job in left:
        slurm_cluster.scancel(job)
    assert left == [], "jobs of points that have ended, and that are run again"


@pytest.fixture
def hydras_own() -> Iterator[None]:
    with as_in_hydras_own_tests():
        yield


@pytest.mark.usefixtures("hydras_own")
@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_slurm", SHORT)])
class TestSlurmLauncher(LauncherTestSuite):
    """Hydra's rules for any launcher."""


@pytest.mark.usefixtures("hydras_own")
@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_slurm", [*SHORT, "hydra.sweeper.max_batch_size=2"])])
class TestSlurmLauncherInBatches(BatchedSweeperTestSuite):
    """A sweeper that hands over a few points at a time."""


WITH_APPLICATIONS = pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, [*QUIET, "hydra/launcher=hpc_slurm", *SHORT])]
)


@pytest.mark.long
@WITH_APPLICATIONS
class TestSlurmLauncherWithApplications(IntegrationTestSuite):
    """Applications in processes of their own. All of it passes here on the local launcher, too."""


@WITH_APPLICATIONS
class TestSlurmLauncherWithAnApplication(IntegrationTestSuite):
    """One of these tests, test_to_absolute_path_multirun."""

    test_custom_task_name = test_custom_sweeper_run_workdir = test_get_orig_dir_multirun = None


@pytest.fixture
def sweeping(tmp_path: Path) -> Sweeping:
    return Sweeping(tmp_path)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a script in front of one of Slurm's commands."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)

    return write


def submitted(sweeping: Sweeping) -> list[str]:
    """Ids of the arrays of a sweep."""
    return sorted(path.name.split("_")[0] for path in sweeping.folder.glob("*_submission.sh"))


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_every_end_of_a_point_is_told_without_accounting_and_edits_come_too_late(
    slurm_cluster: SlurmCluster, sweeping: Sweeping, stub: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = os.urandom(8).hex()
    monkeypatch.setenv("MY_SECRET", canary)
    monkeypatch.setenv("NAMED_IN_THE_CONFIGURATION", "here")
    monkeypatch.setenv("SLURM_NTASKS", "7")  # as in a job that submits others
    stub("sacct", "exit 1")

    def edit_release_and_stop() -> None:
        wait_for(sweeping.folder / "released")
        (sweeping.place / "conf/config.yaml").write_text(CONF.replace("x: 1.0", "x: 999.0"))
        (job,) = submitted(sweeping)
        slurm_cluster.scontrol("update", f"JobId={job}", "StartTime=now")
        wait_for(sweeping.place / "holds-7")
        slurm_cluster.command("scancel", "--signal=USR2", f"{job}_5")

    def release() -> None:
        wait_for_pending(slurm_cluster)
        (sweeping.folder / "released").write_text("now")

    helpers = [in_background(edit_release_and_stop), in_background(release)]
    points = [["do=value"], ["do=raise"], ["do=exit"], ["do=kill_job"], ["do=seen"], ["do=once", "x=7"]]
    returns = sweeping.launch("hpc_slurm", [*LIMITS, "+extra.begin=now+1hour"], *points)
    for helper in helpers:
        helper.join()
    (job,) = submitted(sweeping)
    squared, raised, left, killed, seen, stopped = map(value, returns)
    assert squared == 1.0, "what was composed at submission"
    assert "Picky" in str(raised) + "".join(getattr(raised, "__notes__", ()))
    assert "SystemExit: 3" in str(left)
    assert f"job {job}_3: FAILED" in str(killed)
    assert "last words" in str(killed)
    assert stopped == 2, "told to stop it was run again"
    assert seen["variable"] == "here"
    assert seen["env"]["MY_SECRET"] is None
    ended = [slurm_cluster.job(f"{job}_{index}") for index in range(6)]
    states = [job["JobState"] for job in ended]
    assert [job["Restarts"] for job in ended] == ["0"] * 5 + ["1"]
    assert states == ["COMPLETED", "FAILED", "FAILED", "FAILED", "COMPLETED", "COMPLETED"]
    assert ended[1]["ExitCode"] == "1:0"
    assert returns[0].hydra_cfg.hydra.job.id == f"{job}_0"
    files = [path for path in sweeping.place.rglob("*") if path.is_file()]
    assert not [path for path in files if canary.encode() in path.read_bytes()]


def wait_for_pending(slurm_cluster: SlurmCluster) -> None:
    """Until there is a job of the application that waits for its time."""
    while not slurm_cluster.squeue("--name=app", "--states=PENDING", "-o", "%i"):
        time.sleep(0.1)


def test_points_of_different_degrees_go_into_arrays_of_their_own(
    slurm_cluster: SlurmCluster, sweeping: Sweeping, stub: Callable[[str, str], None]
) -> None:
    real = subprocess.run(["which", "scontrol"], capture_output=True, text=True, check=True).stdout.strip()
    stub("scontrol", f'[ "$1 $2" != "show config" ] || {{ echo "MaxArraySize = 2"; exit; }}; exec {real} "$@"')
    cluster = ["+cluster.name=here", "+cluster.node.ranks=2", "+parallel.dp_replicate=1"]
    small, large = [*cluster, "+parallel.tp=2"], [*cluster, "+parallel.tp=4"]
    points = [["do=rank", *small], ["do=rank", *large], ["do=rank_1_raises", *small], ["do=rank", *small]]
    returns = sweeping.launch("hpc_slurm", [*LIMITS, "parallel_points=2"], *points)
    assert [value(it) for index, it in enumerate(returns) if index != 2] == [0, 0, 0]
    assert returns[2].status is JobStatus.FAILED
    assert "Picky: 5 and 6" in str(value(returns[2])) + "".join(getattr(value(returns[2]), "__notes__", ()))
    jobs = submitted(sweeping)
    assert len(jobs) == 3, "two points of one node each in an array, one in the next, and the one of two nodes"
    assert sorted(slurm_cluster.job(f"{job}_0")["NumNodes"] for job in jobs) == ["1", "1", "2"]
    assert len(list(sweeping.folder.glob("*_log.out"))) == 2 + 4 + 2 + 2, "one a rank"


def test_what_sbatch_refuses_is_one_line_and_leaves_nothing(slurm_cluster: SlurmCluster, sweeping: Sweeping) -> None:
    with pytest.raises(HydraException, match=r"hydra\.launcher\.partition=nowhere: invalid partition"):
        sweeping.launch("hpc_slurm", ["name=never", "partition=nowhere"], [], [])
    with pytest.raises(HydraException, match=r"sbatch refused the job: .*[Ii]nvalid node name"):
        sweeping.launch("hpc_slurm", ["name=never", "+extra.nodelist=nowhere"], [], [])
    assert not sweeping.folder.exists()
    assert not slurm_cluster.squeue("--name=never", "-o", "%i")


def test_optuna_hands_over_batch_after_batch(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    found = tried(tmp_path, "hpc_slurm", 4, *SHORT)
    assert len(set(found)) == 4
    jobs = submitted(Sweeping(tmp_path))
    assert len(jobs) == 2, "an array a batch"
    assert [len(slurm_cluster.squeue("-r", "-t", "all", "-j", job)) for job in jobs] == [2, 2]


def test_ranks_see_the_gpus_that_slurm_gave_the_job(
    one_more_cluster: Path, sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ("--nodes", "1", "--cpus-per-node", "4", "--gpus-per-node", "4", "--no-accounting")
    up = dev_cluster("up", *shape, directory=one_more_cluster)
    assert up.returncode == 0, up.stderr
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf(one_more_cluster)))
    (returned,) = sweeping.launch("hpc_slurm", [*LIMITS, "ranks_per_node=2", "gpus_per_node=2"], ["do=seen"])
    assert value(returned)["env"]["CUDA_VISIBLE_DEVICES"] == "0,1", "both of the job, for peer access, and no other's"


def begun(place: Path, settings: list[str]) -> subprocess.Popen[str]:
    """A launcher of two points in a process of its own."""
    place.mkdir()
    script = (
        "from pathlib import Path; from sweeping import Sweeping\n"
        f"Sweeping(Path({str(place)!r})).launch('hpc_slurm', {settings}, ['do=hold', 'x=0'], ['do=hold', 'x=1'])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(APPLICATION), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-u", "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def test_ctrl_c_and_sigterm_cancel_the_jobs_those_too_that_would_wait_for_ever(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    held, runs = tmp_path / "held", tmp_path / "runs"
    with begun(held, [*LIMITS, "+extra.hold="]) as told, begun(runs, LIMITS) as interrupted:
        assert told.stdout is not None
        line = next(line for line in told.stdout if "PENDING" in line)
        jobs = submitted(Sweeping(held))
        assert f"2 PENDING (JobHeldUser); `scontrol release {jobs[0]}` lets them start" in line
        told.send_signal(signal.SIGTERM)
        wait_for(runs / "holds-0")
        interrupted.send_signal(signal.SIGINT)
        assert told.wait(60) == 128 + signal.SIGTERM
        assert interrupted.wait(60) != 0
    for job in [*jobs, *submitted(Sweeping(runs))]:
        for index in range(2):
            slurm_cluster.wait_for_state(f"{job}_{index}", "CANCELLED")
