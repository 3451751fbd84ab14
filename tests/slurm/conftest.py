"""Every test in this folder runs on the real Slurm of slurm/dev-cluster and carries the mark `slurm`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_images import build_image
from slurm_client import SHAPE, SlurmCluster, dev_cluster, slurm_conf
from sweep_client import Sweep
from token_stores import build_store

HERE = Path(__file__).resolve().parent
DOWN = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def first_cluster() -> Iterator[Path]:
    """slurm.conf of the dev cluster: 4 nodes, 2 leaf switches, accounting; one that is up is used and left up."""
    demand_root_on_debian()
    was_down = dev_cluster("status").returncode == DOWN
    started = dev_cluster("up", *SHAPE)
    if started.returncode:
        pytest.fail(started.stderr, pytrace=False)
    try:
        yield slurm_conf()
    finally:
        if was_down:
            dev_cluster("down")


@pytest.fixture(scope="module")
def slurm_cluster(first_cluster: Path) -> Iterator[SlurmCluster]:
    """The dev cluster, which the clients find as long as the tests of one file run.

    Tests elsewhere that put a program in the place of squeue would otherwise have the real scontrol answer about a job
    of the same number.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(first_cluster))
        yield SlurmCluster(first_cluster)


@pytest.fixture(scope="session")
def second_cluster() -> Iterator[Path]:
    """Directory of a cluster of four nodes and a spare, for the tests of faults, which wait for minutes.

    Its name is short, as those of Slurm's sockets have to be.
    """
    demand_root_on_debian()
    with tempfile.TemporaryDirectory(prefix="second-") as folder:
        directory = Path(folder) / "c"
        words = ("up", "--nodes", "5", "--cpus-per-node", "8", "--switches", "2")
        started = dev_cluster(*words, directory=directory)
        assert started.returncode == 0, started.stderr
        yield directory
        down = dev_cluster("down", directory=directory)
        assert down.returncode == 0, down.stderr


@pytest.fixture(autouse=True)
def _no_node_is_drained(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail where Slurm could not end the processes of a job, which takes the node out of service, and take it back.

    That happens a minute after the job, so that an earlier test may be to blame.
    """
    yield
    cluster = request.node.funcargs.get("slurm_cluster")
    if cluster is None:
        return
    drained = cluster.resume_drained_nodes()
    assert not drained, f"drained because a job's processes could not be ended, maybe of an earlier test: {drained}"


def demand_root_on_debian() -> None:
    if os.geteuid() == 0 and shutil.which("dpkg-query"):
        return
    reason = "the Slurm tests need root on Debian 12 or newer: slurm/dev-cluster makes namespaces and installs Slurm"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def one_more_cluster(slurm_cluster: SlurmCluster) -> Iterator[Path]:
    """Directory for a cluster beside the main one (whose packages it uses); taken down at the end.

    Its name is short: Slurm's sockets lie in it, whose paths may have 108 characters.
    """
    with tempfile.TemporaryDirectory(prefix="beside-") as directory:
        yield Path(directory) / "c"
        down = dev_cluster("down", directory=Path(directory) / "c")
        assert down.returncode == 0, down.stderr


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.h5"
    build_store([str(Path(json.__file__).parent)], [".py"], "byte", 256, path)
    return path


@pytest.fixture(scope="session")
def container_image() -> Iterator[Path]:
    """The folder of an image, in a place that every user may enter; see container_images."""
    folder = Path(tempfile.mkdtemp(prefix="image-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield build_image(folder)
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # some 100,000 files


@pytest.fixture
def sweep(tmp_path: Path, store: Path, slurm_cluster: SlurmCluster) -> Iterator[Sweep]:
    """A place for a sweep, no job of which outlives its test."""
    made = Sweep(tmp_path / "sweep", store)
    yield made
    for job in slurm_cluster.squeue("-o", "%A %Z"):
        if str(tmp_path) in job or str(Path.cwd()) in job:
            slurm_cluster.scancel(job.split()[0])
