"""Hydra's own suites for launchers, on the local one. On Slurm they run in tests/slurm/."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite
from sweeping import as_in_hydras_own_tests

QUIET = ["-m", "hydra/hydra_logging=disabled", "hydra/job_logging=disabled"]


@pytest.fixture
def hydras_own() -> Iterator[None]:
    with as_in_hydras_own_tests():
        yield


@pytest.mark.parametrize("name", ["HpcLocalLauncher", "HpcSlurmLauncher"])
def test_launchers_are_discovered(name: str) -> None:
    assert name in [launcher.__name__ for launcher in Plugins.instance().discover(Launcher)]


LAUNCHER = pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_local", [])])


@pytest.mark.long
@pytest.mark.usefixtures("hydras_own")
@LAUNCHER
class TestLocalLauncher(LauncherTestSuite):
    """Hydra's rules for any launcher."""


@pytest.mark.usefixtures("hydras_own")
@LAUNCHER
class TestLocalLauncherWithFewSweeps(LauncherTestSuite):
    """Hydra's rules for any launcher, without three sweeps that `make test` runs on Slurm."""

    test_sweep_2_optimizers = test_sweep_over_unspecified_mandatory_default = test_sweep_and_override = None


@pytest.mark.usefixtures("hydras_own")
@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpc_local", ["hydra.sweeper.max_batch_size=2"])])
class TestLocalLauncherInBatches(BatchedSweeperTestSuite):
    """A sweeper that hands over a few points at a time."""


WITH_APPLICATIONS = pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, [*QUIET, "hydra/launcher=hpc_local"])]
)


@pytest.mark.long
@WITH_APPLICATIONS
class TestLocalLauncherWithApplications(IntegrationTestSuite):
    """Applications in processes of their own."""


@WITH_APPLICATIONS
class TestLocalLauncherWithFewApplications(IntegrationTestSuite):
    """Applications, without test_custom_sweeper_run_workdir: tests of points look at these folders, too."""

    test_custom_sweeper_run_workdir = None
