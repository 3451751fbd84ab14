"""conf/launch and conf/container: where a job runs, what it asks the scheduler for, and what its ranks run in."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field


@config_dataclass
class LaunchConfig:
    """local starts ranks on this machine; slurm submits a batch job."""

    kind: str = config_field(default="local", choices=("local", "slurm"))
    """Where `train` and `submit` run: local starts processes on this machine, slurm submits a job."""
    ranks: int | None = config_field(default=None, ge=1, le=4096)
    """local: processes to start; None: one a GPU of this machine, or 2 without GPUs."""
    threads: int | None = config_field(default=None, ge=1, le=4096)
    """CPU threads of a rank; None: this machine's cores shared out (local), the CPUs Slurm gave a task (slurm)."""
    name: str = "hpc_train"
    """Job name."""
    time_minutes: int = config_field(default=60, ge=1, le=10**7)
    """Time limit of the job."""
    partition: str | None = None
    """None: the cluster's."""
    account: str | None = None
    """sbatch --account; None: the user's default."""
    qos: str | None = None
    """sbatch --qos; None: the default of the partition."""
    constraint: str | None = None
    """None: the cluster's."""
    reservation: str | None = None
    """sbatch --reservation; None: no reservation."""
    exclude: str | None = None
    """sbatch --exclude: nodes to leave out, as a host list; None: no node."""
    cpus_per_rank: int | None = config_field(default=None, ge=1, le=1 << 16)
    """None: the node's cores shared out evenly over its ranks."""
    memory_gib: float | None = config_field(default=None, gt=0, le=1e6)
    """Memory a node; None: the partition's default."""
    placement: str = config_field(default="auto", choices=("auto", "launcher", "strict"))
    """auto: place ranks on nodes by the topology where that gains; the launcher's order, loudly, where facts are
    missing or disagree; strict: refuse to start then; launcher: always the launcher's order."""
    bind: bool = True
    """Bind every rank to the processors and the memory next to its GPU (without GPUs: to its share of the node)."""
    signal_seconds: int = config_field(default=120, ge=10, le=65535)
    """How long before the time limit the job is told to save and stop; Slurm may be up to 60 s early."""
    cancel_seconds: int | None = config_field(default=None, ge=1, le=10**6)
    """How long `hpc-train cancel` waits for the ranks to save and end before it ends them; None: signal_seconds."""
    max_attempts: int = config_field(default=100, ge=1, le=10**6)
    """Runs of one job, counting the requeued ones, after which it is not requeued again."""
    spares: int = config_field(default=0, ge=0, le=1000)
    """slurm: nodes to ask for beside those of the ranks. One of them takes over, in the same job, for a node that falls
    silent or is to blame too often."""
    chain: int = config_field(default=1, ge=1, le=1000)
    """slurm: jobs to submit, each of which goes on where the one before it stopped at its time limit, in place of a
    requeue; those that are left when the run is over are cancelled."""
    parallel_points: int | None = config_field(default=None, ge=1, le=10**6)
    """Points of a sweep that run at a time; None: as many as Slurm lets (slurm), or as cores and GPUs allow (local)."""
    points_per_job: int = config_field(default=1, ge=1, le=1024)
    """slurm: points of a sweep that share the nodes of one job, side by side, each with its own CPUs and GPUs."""
    export: list[str] = config_field(default=[])
    """slurm: more variables of the submitting shell that the job gets, by name or pattern; the usual ones it gets
    anyway, secrets only by name. Their values are written to no file."""
    snapshot: str = config_field(default="auto", choices=("auto", "off"))
    """slurm, auto: jobs run the code as it was when they were submitted: hpc_train, where it is a checkout, and the
    project that model.module is in; off: whatever is there when they start."""
    snapshot_dir: str | None = None
    """Where snapshots of the code lie, shared by all runs that have the same; None: beside the run directory."""
    snapshot_max_mib: float = config_field(default=64.0, gt=0)
    """Most that the code may be."""
    snapshot_include: list[str] = config_field(default=[])
    """More files or folders of the project, such as extensions that were built in place and that git ignores."""
    snapshot_exclude: list[str] = config_field(default=[])
    """Patterns of files and folders of the project that are not frozen, such as `notebooks` or `*.ipynb`."""
    timeout_seconds: int = config_field(default=1800, ge=10, le=10**7)
    """A collective or a rendezvous that takes longer than this ends the job."""
    rendezvous_seconds: int = config_field(default=300, ge=5, le=10**7)
    """How long ranks wait for one another at the start, if timeout_seconds is not shorter; then the missing ones are
    named and the job ends."""
    extra: dict[str, str] = config_field(default={})
    """More sbatch options by their long name, such as mail-type: END; with an empty value those that take none."""
    setup: list[str] = config_field(default=[])
    """Shell lines to run in the batch script before the ranks start, such as `module load cuda`."""


@config_dataclass
class ContainerConfig:
    """An image for the ranks. The batch script and Slurm's commands stay outside of it."""

    kind: str = config_field(default="none", choices=("none", "apptainer", "pyxis"))
    """apptainer: `apptainer exec` around each rank; pyxis: srun's --container options (Enroot)."""
    image: str | None = None
    """A file (SIF; squashfs of Enroot) that the nodes see, or the address of an image, such as docker://..."""
    command: str = config_field(default="apptainer", choices=("apptainer", "singularity"))
    """Program that starts containers, for kind=apptainer."""
    python: str = "python3"
    """Python inside of the image; hpc_train is found there, or in the snapshot of the code."""
    gpu: str = config_field(default="auto", choices=("auto", "nvidia", "amd", "none"))
    """apptainer: whose libraries come along (--nv, --rocm); auto: as cluster.gpu.name says."""
    read: list[str] = config_field(default=[])
    """More files or folders that ranks read, under the same path inside; /outside:/inside for another one."""
    write: list[str] = config_field(default=[])
    """The same, to write to as well."""
    env: list[str] = config_field(default=[])
    """More variables whose value outside wins over the image's; settings of NCCL, OpenMP and the like do anyway."""
