"""What the ranks of a job tell each other: what each is and sees, and how fast it is."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_train import __version__
from hpc_train.api import Task
from hpc_train.cluster.spec import Node
from hpc_train.config.compose import to_yaml
from hpc_train.config.run import RunConfig
from hpc_train.doctor.finding import Finding
from hpc_train.runtime.views import mpi_differs, mpi_view, slurm_differs


@dataclass(frozen=True)
class Report:
    """One rank."""

    rank: int
    host: str
    versions: dict[str, str]
    """Of Python, torch and hpc_train."""
    config: str
    """Hash of the configuration that it was started with."""
    interface: str
    """Network interface that it opens sockets on; empty where there is none."""
    address: str
    gpus: int
    """That torch sees."""
    slurm: str | None = None
    """One line where Slurm counts other ranks than the launcher."""
    mpi: str | None = None
    """One line where MPI does."""
    findings: list[Finding] = field(default_factory=list)
    """Of its node, from the first rank there."""
    nvlinks: list[int] = field(default_factory=list)
    """Of each GPU of its node, from the first rank there."""
    rates: list[float] = field(default_factory=list)
    """Gbit/s of each port of its node that is up, from the first rank there."""


@dataclass(frozen=True)
class Speed:
    """What a rank measured while all others did the same."""

    product: float
    """Seconds of a matrix product."""
    copy: float
    """Seconds of a copy in the device's memory."""
    device: str
    """cpu or cuda."""


def own_report(
    task: Task,
    config: RunConfig,
    env: Mapping[str, str],
    network: tuple[str, str],
    findings: list[Finding],
    node: Node | None,
) -> Report:
    """This process's. network: (address, interface). findings, node: of the first rank of a node."""
    import torch

    return Report(
        rank=task.process,
        host=task.host,
        versions={"Python": platform.python_version(), "torch": torch.__version__, "hpc_train": __version__},
        config=hashlib.sha256(to_yaml(config).encode()).hexdigest()[:12],
        address=network[0],
        interface=network[1],
        gpus=torch.cuda.device_count(),
        slurm=slurm_differs(task, env),
        mpi=mpi_line(task, env),
        findings=findings,
        nvlinks=[gpu.nvlinks or 0 for gpu in node.gpus] if node else [],
        rates=[nic.gbit_s for nic in node.nics if nic.active and nic.gbit_s] if node else [],
    )


def mpi_line(task: Task, env: Mapping[str, str]) -> str | None:
    """How MPI would see this process, if not as the launcher does. Asked of MPI only where it was told anything.

    Elsewhere each process would be alone to it, and some libraries abort rather than say so.
    """
    told = any(name.startswith(("PMIX_", "PMI_", "OMPI_COMM_WORLD_")) for name in env)
    if told and (task.launcher == "mpi" or "SLURM_STEP_ID" in env):
        view = mpi_view()
        return None if view is None else mpi_differs(task, view)
    if "SLURM_STEP_ID" in env and task.processes > 1:
        return "srun told MPI nothing (--mpi=none): to MPI every rank is 0 of 1; where MPI is used, srun --mpi=pmix"
    return None
