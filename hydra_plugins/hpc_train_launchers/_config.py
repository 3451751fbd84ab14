"""The settings of the launchers: those of conf/launch that make sense in any Hydra application, same names."""

from __future__ import annotations

from dataclasses import dataclass, field

_HERE = "hydra_plugins.hpc_train_launchers.plugin"


@dataclass
class HpcLocalConf:
    """Points as processes of this machine."""

    _target_: str = f"{_HERE}.HpcLocalLauncher"
    folder: str = "${hydra.sweep.dir}/.submitit"
    """Folder of calls, results and logs; readable by its owner alone."""
    ranks: int = 1
    """Processes of a point, all of which run the task function; what the first returns counts."""
    parallel_points: int | None = None
    """Points that run at the same time; None: as many as there are cores (and GPUs) for."""
    threads: int | None = None
    """CPU threads of a rank; None: the cores shared out evenly."""
    gpus_per_point: int | None = None
    """GPUs of a point, no two of which share one; None: all points see what this process sees."""
    time_minutes: int | None = None
    """Time limit of a point; None: none."""
    signal_seconds: int = 120
    """Seconds before the time limit at which a point is told to stop (SIGUSR2)."""
    max_attempts: int = 100
    """Runs of one point, counting those after it was told to stop."""
    max_timeouts: int = 0
    """Number of times that a point which is out of time is run again, from its own checkpoint if it has one."""
    setup: list[str] = field(default_factory=list)
    """Shell lines to run before every rank."""
    python: list[str] = field(default_factory=list)
    """The words that start Python, such as [apptainer, exec, image.sif, python]; []: the one that runs now."""


@dataclass
class HpcSlurmConf:
    """Points as elements of sbatch arrays."""

    _target_: str = f"{_HERE}.HpcSlurmLauncher"
    folder: str = "${hydra.sweep.dir}/.submitit"
    """Folder of calls, results and logs, on a file system that the nodes share; readable by its owner alone."""
    name: str = "${hydra.job.name}"
    """Job name."""
    time_minutes: int = 60
    """Time limit of a point."""
    nodes: int | None = None
    """None: as many as the degrees of an hpc_train configuration need, else 1."""
    ranks_per_node: int | None = None
    """Processes that run the task function, the first of whose results counts; None: the cluster's, else 1."""
    gpus_per_node: int | None = None
    """None: the cluster's, else none."""
    gpu_request: str | None = None
    """Which sbatch option asks for GPUs: gpus_per_node, gres or none; None: the cluster's, else gpus_per_node."""
    cpus_per_rank: int | None = None
    memory_gib: float | None = None
    """Memory a node; None: the partition's default."""
    exclusive: bool | None = None
    """Ask for whole nodes; None: the cluster's, else not."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    parallel_points: int | None = None
    """Points that run at the same time; None: as many as Slurm lets."""
    signal_seconds: int = 120
    """Seconds before the time limit at which a point is told to stop (SIGUSR2); Slurm may be up to 60 s early."""
    max_attempts: int = 100
    """Runs of one point, counting those after a preemption or the loss of a node."""
    max_timeouts: int = 0
    """Number of times that a point which is out of time is run again, from its own checkpoint if it has one."""
    export: list[str] = field(default_factory=list)
    """More variables that jobs get, by name or pattern; the usual ones, those in hydra.job.env_copy and those that the
    configuration names with oc.env they get anyway."""
    extra: dict[str, str] = field(default_factory=dict)
    """More sbatch options by their long name, such as mail-type: END; with an empty value those that take none."""
    srun: list[str] = field(default_factory=list)
    """More options of srun, such as --mpi=pmix."""
    setup: list[str] = field(default_factory=list)
    """Shell lines to run in the batch script before the ranks start, such as `module load cuda`."""
    python: list[str] = field(default_factory=list)
    """The words that start Python, such as [apptainer, exec, image.sif, python]; []: the one that runs now."""
