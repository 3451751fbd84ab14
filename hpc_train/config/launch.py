"""conf/launch and conf/container: where a job runs, what it asks of the scheduler, and its ranks' container."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field


@config_dataclass
class LaunchConfig:
    """local starts ranks on this machine; slurm submits a batch job."""

    kind: str = config_field(default="local", choices=("local", "slurm"))
    """How ranks are started. local: as processes on this machine; slurm: by submitting a job."""
    ranks: int | None = config_field(default=None, ge=1, le=4096)
    """local: processes to start; None: one per GPU of this machine, or 2 without GPUs."""
    threads: int | None = config_field(default=None, ge=1, le=4096)
    """CPU threads of a rank; None: an equal share of the cores (local), or the CPUs that Slurm gave the task
    (slurm)."""
    name: str = "hpc_train"
    """Job name."""
    time_minutes: int = config_field(default=60, ge=1, le=10**7)
    """Time limit of the job."""
    partition: str | None = None
    """sbatch --partition; None: the cluster's."""
    account: str | None = None
    """sbatch --account; None: the user's default."""
    qos: str | None = None
    """sbatch --qos; None: the default of the partition."""
    constraint: str | None = None
    """sbatch --constraint; None: the cluster's."""
    reservation: str | None = None
    """sbatch --reservation; None: no reservation."""
    exclude: str | None = None
    """sbatch --exclude: nodes to leave out, as a host list; None: no node."""
    cpus_per_rank: int | None = config_field(default=None, ge=1, le=1 << 16)
    """CPU cores of a rank; None: an equal share of the node's cores."""
    memory_gib: float | None = config_field(default=None, gt=0, le=1e6)
    """Memory per node, GiB; None: the partition's default."""
    placement: str = config_field(default="auto", choices=("auto", "launcher", "strict"))
    """Order of ranks on nodes. auto: by the topology if that is faster; if facts are missing or contradict, the
    launcher's order with a warning. strict: refuse to start in that case. launcher: always the launcher's order."""
    compact_nodes: str = config_field(default="auto", choices=("off", "auto", "ask"))
    """slurm: whether to ask for nodes that are close together (sbatch --switches, --segment or --contiguous). auto: if
    the shorter communication is expected to save more than the wait for them costs; ask: whenever Slurm can."""
    bind: bool = True
    """Bind every rank to the cores and the memory next to its GPU, or without GPUs to its share of the node."""
    signal_seconds: int = config_field(default=120, ge=10, le=65535)
    """How long before the time limit the job is told to save and stop; Slurm may be up to 60 s early."""
    cancel_seconds: int | None = config_field(default=None, ge=1, le=10**6)
    """How long `hpc-train cancel` waits for the ranks to save and end before it ends them; None: signal_seconds."""
    max_attempts: int = config_field(default=100, ge=1, le=10**6)
    """Maximum attempts of one job: after as many it is not requeued again."""
    spares: int = config_field(default=0, ge=0, le=1000)
    """slurm: additional nodes to request. One of them replaces, in the same job, a node that falls silent or causes
    faults too often."""
    chain: int = config_field(default=1, ge=1, le=1000)
    """slurm: number of jobs to submit instead of requeueing one. Each continues where the one before it stopped at its
    time limit; those that are left when the run is done are cancelled."""
    parallel_points: int | None = config_field(default=None, ge=1, le=10**6)
    """Points of a sweep that run at the same time; None: as many as Slurm allows, or (local) as cores and GPUs
    allow."""
    points_per_job: int = config_field(default=1, ge=1, le=1024)
    """slurm: points of a sweep that share the nodes of one job, side by side, each with its own CPUs and GPUs."""
    export: list[str] = config_field(default=[])
    """slurm: additional environment variables to pass to the job, by name or pattern. The usual ones are passed anyway,
    secrets only by name. Their values are written to no file."""
    snapshot: str = config_field(default="auto", choices=("auto", "off"))
    """slurm: which code jobs run. auto: as it was when they were submitted (hpc_train, if it is a checkout, and the
    project with model.module); off: as it is when they start."""
    snapshot_dir: str | None = None
    """Folder of code snapshots; runs with the same code share one. None: beside the run directory."""
    snapshot_max_mib: float = config_field(default=64.0, gt=0)
    """Maximum size of a code snapshot, MiB."""
    snapshot_include: list[str] = config_field(default=[])
    """Additional files or folders of the project in the snapshot, such as extensions built in place that git
    ignores."""
    snapshot_exclude: list[str] = config_field(default=[])
    """Patterns of files and folders to leave out of the snapshot, such as `notebooks` or `*.ipynb`."""
    timeout_seconds: int = config_field(default=1800, ge=10, le=10**7)
    """A collective or a rendezvous that takes longer than this ends the job."""
    rendezvous_seconds: int = config_field(default=300, ge=5, le=10**7)
    """How long ranks wait for one another at the start (at most timeout_seconds); then the job ends and names the
    missing ranks."""
    extra: dict[str, str] = config_field(default={})
    """Additional sbatch options by long name, such as mail-type: END; an empty value for options without one."""
    setup: list[str] = config_field(default=[])
    """Shell lines to run in the batch script before the ranks start, such as `module load cuda`."""
    wrap: list[str] = config_field(default=[])
    """Words that start each rank's Python, such as [nsys,profile] or [numactl,--interleave=all]; no shell reads
    them."""


@config_dataclass
class ContainerConfig:
    """An image for the ranks. The batch script and Slurm's commands stay outside of it."""

    kind: str = config_field(default="none", choices=("none", "apptainer", "charliecloud", "podman", "pyxis"))
    """apptainer: `apptainer exec` around each rank; charliecloud: `ch-run`; podman: `podman run`; pyxis: srun's
    --container options (Enroot)."""
    image: str | None = None
    """A file (SIF; squashfs of Enroot) or folder (Charliecloud, Podman) that the nodes see; with apptainer and pyxis
    also the address of an image, such as docker://..."""
    command: str = config_field(default="apptainer", choices=("apptainer", "singularity"))
    """Program that starts containers, for kind=apptainer."""
    runtime: str = config_field(default="crun", choices=("crun", "runc"))
    """Program with which Podman starts containers. With runc, ranks keep only their primary group."""
    python: str = "python3"
    """Python inside of the image; hpc_train is found there, or in the snapshot of the code."""
    gpu: str = config_field(default="auto", choices=("auto", "nvidia", "amd", "none"))
    """Vendor of the GPU libraries to add; auto: that of cluster.gpu.name. apptainer: --nv or --rocm; podman: NVIDIA's,
    from the nodes' CDI files (nvidia-ctk). Images of Charliecloud have them inside (ch-fromhost)."""
    read: list[str] = config_field(default=[])
    """Additional files or folders that ranks read, under the same path inside; /outside:/inside for another path."""
    write: list[str] = config_field(default=[])
    """Additional files or folders that ranks also write to, given like those of `read`."""
    env: list[str] = config_field(default=[])
    """Additional variables whose outside value overrides the image's; those of NCCL, OpenMP and the like always do."""
