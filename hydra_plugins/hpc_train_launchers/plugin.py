"""The launchers that Hydra finds: they return when every point has ended, as Hydra requires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from hydra_plugins.hpc_train_launchers._config import HpcLocalConf, HpcSlurmConf

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from hydra_plugins.hpc_train_launchers._sweep import Application


# Hydra runs this module anew whenever it looks for plugins, with a ConfigStore that may be new, too.
for _name, _kind in (("hpc_local", HpcLocalConf), ("hpc_slurm", HpcSlurmConf)):
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_kind, provider="hpc_train")


class HpcLocalLauncher(Launcher):
    """Runs every point as processes of this machine, as many at a time as it has room for."""

    def __init__(self, **settings: Any) -> None:
        self._settings = HpcLocalConf(**_to_plain(settings))
        self._application: Application | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what is to be run (Hydra's method)."""
        from hydra_plugins.hpc_train_launchers._sweep import make_application

        self._application = make_application(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a point for each list of overrides (Hydra's method); a point that fails has a JobReturn that says so."""
        from hydra_plugins.hpc_train_launchers._local import LocalBackend
        from hydra_plugins.hpc_train_launchers._sweep import launch_points

        assert self._application is not None
        return launch_points(self._application, LocalBackend(self._settings), job_overrides, initial_job_idx)


class HpcSlurmLauncher(Launcher):
    """Runs every point as an element of an sbatch array, with an array for each set of resources."""

    def __init__(self, **settings: Any) -> None:
        self._settings = HpcSlurmConf(**_to_plain(settings))
        self._application: Application | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what is to be run (Hydra's method)."""
        from hydra_plugins.hpc_train_launchers._sweep import make_application

        self._application = make_application(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a point for each list of overrides (Hydra's method); a point that fails has a JobReturn that says so."""
        from hydra_plugins.hpc_train_launchers._slurm import SlurmBackend
        from hydra_plugins.hpc_train_launchers._sweep import launch_points

        assert self._application is not None
        return launch_points(self._application, SlurmBackend(self._settings), job_overrides, initial_job_idx)


def _to_plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for name, value in settings.items()
    }
