"""On a real Slurm: what is edited while a job waits changes nothing of it; modules load, or the job says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_client import SlurmCluster

ONE_RANK = ["cluster.nodes=1", "cluster.node.ranks=1", "cluster.slurm.exclusive=false", "launch.time_minutes=5"]
QUICK = [
    *("train.steps=2", "train.global_batch=2", "train.micro_batch=2", "train.sequence_length=16", "train.eval_every=0"),
    *("train.noise_scale.every=0", "train.log_every=1", "checkpoint.every=0", "launch.placement=launcher"),
]
CUSTOM = ["model=mine", "--config-dir", "options"]
LATER = ["+launch.extra.begin=now+1hour"]
MODEL = """
from pathlib import Path

import helper
from torch import nn

from hpc_train.models import register


@register("mine")
def mine(width: int) -> nn.Module:
    told = (Path(__file__).parent / "told.yaml").read_text().strip()
    print(f"model {VERSION}, helper {{helper.VERSION}}, file {{told}}, width {{width}}")
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))
"""


def hpc_train(folder: Path, *words: str, umask: int = 0o022, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, as it is typed in `folder`."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("hpc-train")), *words],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        umask=umask,
    )


def submit(folder: Path, run: str, *words: str, umask: int = 0o022, **env: str) -> str:
    where = ["submit", "--json", *ONE_RANK, *QUICK, f"run_dir={folder}/runs/{run}"]
    said = hpc_train(folder, *where, *words, umask=umask, **env)
    assert said.returncode == 0, said.stderr
    return str(json.loads(said.stdout)["job_id"])


def release(cluster: SlurmCluster, job: str) -> None:
    cluster.scontrol("update", f"JobId={job}", "StartTime=now")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token store."""
    path = tmp_path_factory.mktemp("store") / "text.h5"
    built = hpc_train(path.parent, "data", "build", str(path), str(Path(json.__file__).parent))
    assert built.returncode == 0, built.stderr
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's repository: a model, a helper that git does not know yet, and options of their own."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "options/model").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("runs/\n")
    write_version(tmp_path, 1)
    subprocess.run(["git", "-C", str(tmp_path), "add", "my_models.py", "options"], check=True)
    return tmp_path


def write_version(project: Path, number: int) -> None:
    """All that a user may edit."""
    (project / "my_models.py").write_text(MODEL.format(VERSION=number))
    (project / "helper.py").write_text(f"VERSION = {number}\n")
    (project / "told.yaml").write_text(f"{number}\n")
    option = f"defaults: [custom_schema]\nname: mine\nmodule: my_models\nargs: {{width: {10 + number}}}\n"
    (project / "options/model/mine.yaml").write_text(option)


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(slurm_cluster: SlurmCluster) -> Iterator[None]:
    before = set(slurm_cluster.squeue("-o", "%i"))
    yield
    for job in set(slurm_cluster.squeue("-o", "%i")) - before:
        slurm_cluster.scancel(job)


def test_what_is_edited_while_a_job_waits_changes_nothing_of_it(
    slurm_cluster: SlurmCluster, project: Path, store: Path
) -> None:
    frozen = submit(project, "frozen", *CUSTOM, *LATER, f"data.path={store}")
    live = submit(project, "live", *CUSTOM, *LATER, f"data.path={store}", "launch.snapshot=off")
    write_version(project, 2)
    edited = submit(project, "edited", *CUSTOM, f"data.path={store}")
    for job in (frozen, live):
        release(slurm_cluster, job)
    for job in (frozen, live, edited):
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
    told = {run: (project / f"runs/{run}/logs/0/task-0.log").read_text() for run in ("frozen", "live", "edited")}
    assert "model 1, helper 1, file 1, width 11" in told["frozen"]
    assert "model 2, helper 2, file 2, width 11" in told["live"], "without a snapshot code is what it is by then"
    assert "model 2, helper 2, file 2, width 12" in told["edited"]
    specs = [json.loads((project / f"runs/{run}/job.json").read_text()) for run in ("frozen", "live", "edited")]
    assert len({spec["code"] for spec in specs}) == 3
    assert specs[1]["code"] == ""
    stored = {path.name for path in (project / f"runs/.hpc_train-code-{os.getuid()}").iterdir()}
    assert stored == {"users.jsonl", *(Path(spec["code"]).name for spec in specs if spec["code"])}


def test_modules_are_loaded_and_no_secret_leaves_the_shell(
    slurm_cluster: SlurmCluster, project: Path, store: Path
) -> None:
    """One job whose modules are there, submitted from a shell full of secrets and with a careless umask, and one whose
    module is not.
    """
    site = project.parent / f"{project.name} modules"
    (site / "greeting").mkdir(parents=True)
    (site / "greeting/1.0.lua").write_text('setenv("GREETING", "of the module")\n')
    (project / "my_models.py").write_text(SEEING)
    names = ("WANDB_API_KEY", "HF_TOKEN", "NCCL_SECRET", "HPC_TRAIN_TOKEN", "AWS_SECRET_ACCESS_KEY", "OMP_PASSWORD")
    secrets = {name: f"canary-{name.lower()}-71c9" for name in (*names, "GITHUB_PAT", "DATABASE_URL")}
    words = [*CUSTOM, f"data.path={store}", f"cluster.module_path=['{site}']", "train.tensorboard=true"]
    wanted = [*words, "checkpoint.every=1", "launch.export=[WANDB_API_KEY]"]
    good = submit(project, "good", *wanted, "cluster.modules=[greeting]", umask=0, **secrets)
    bad = submit(project, "bad", *words, "cluster.modules=[greeting,nothing/9]", **secrets)
    slurm_cluster.wait_for_state(bad, "FAILED", timeout=60)
    slurm_cluster.wait_for_state(good, "COMPLETED", timeout=120)
    told = (project / "runs/good/logs/0/task-0.log").read_text()
    assert "greeting of the module, secrets ['WANDB_API_KEY']" in told, "what is exported by name is there"
    assert (project / "runs/good/logs/0/modules.txt").read_text().split()[-1] == "greeting/1.0"
    status = json.loads(hpc_train(project, "status", "--json", "runs/bad").stdout)[0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 93)
    assert status["reason"].startswith("cluster.modules: nothing/9 cannot be loaded: ")
    assert not (project / "runs/bad/logs/0/task-0.log").exists()
    assert files_with(b"canary-", project) == []
    assert len(files_with(b"greeting", project)) > 3, "the search finds what is there"
    assert_private(project / "runs/good")


SEEING = """
import os

from torch import nn

from hpc_train.models import register


@register("mine")
def mine(width: int) -> nn.Module:
    seen = sorted(name for name, value in os.environ.items() if value.startswith("canary"))
    print(f"greeting {os.environ['GREETING']}, secrets {seen}")
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))
"""


def files_with(text: bytes, folder: Path) -> list[Path]:
    """Of all kinds, in a folder: logs, scripts, specs, snapshots, checkpoints, TensorBoard's."""
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


def assert_private(run: Path) -> None:
    """Whatever the umask was: folders that only their owner enters, and files that say what to run for them alone."""
    modes = {path.relative_to(run).as_posix(): path.stat().st_mode & 0o777 for path in (run, *run.rglob("*"))}
    assert {name: modes[name] for name in (".", "logs", ".submitit")} == {".": 0o700, "logs": 0o700, ".submitit": 0o700}
    scripts = [name for name in modes if name.endswith("_submission.sh")]
    assert len(scripts) == 1
    for name in ("job.json", "config.yaml", "events.jsonl", *scripts):
        assert modes[name] == 0o600, name
