"""RunConfig, the root of the schema, and its `plan` part: what `hpc-train plan` is asked for."""

from __future__ import annotations

from omegaconf import MISSING

from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.launch import ContainerConfig, LaunchConfig
from hpc_train.config.loggers import LoggersConfig
from hpc_train.config.model import DataConfig, ModelConfig
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.resilience import ResilienceConfig
from hpc_train.config.schema import schema, setting
from hpc_train.config.train import CheckpointConfig, OptimConfig, PrecisionConfig, TrainConfig


@schema
class EnergyConfig:
    """Electricity. No figure has a default: they differ by site, and a wrong one looks like a fact."""

    watts_per_gpu: float | None = setting(default=None, gt=0)
    """Mean draw of a GPU with its share of the node while it trains; None: energy is not told."""
    pue: float | None = setting(default=None, ge=1)
    """Power usage effectiveness of the building: what it draws over what its computers draw. None: computers alone."""
    price_per_kwh: float | None = setting(default=None, gt=0)
    """Only where electricity is paid beside the GPU hours."""
    co2_grams_per_kwh: float | None = setting(default=None, gt=0)
    """Carbon dioxide of one kWh at the site, grams; None: emissions are not reckoned."""


@schema
class StorageConfig:
    """What is kept of a run on paid storage."""

    tib: float | None = setting(default=None, gt=0)
    """Held all the time; None: the checkpoints that are kept."""
    price_per_tib_month: float | None = setting(default=None, gt=0)
    """None: storage is not told."""


@schema
class PlanConfig:
    """Goals, prices and the reliability of a machine; prices are in any one currency."""

    objective: str = setting(default="time", choices=("time", "cost", "loss"))
    """What candidates are ranked by. time: of the run, failures counted; cost: money, or GPU hours where there is no
    price; loss: time to the same loss, which tells batches apart."""
    tokens: float | None = setting(default=None, gt=0)
    """Tokens to train on; None: those of train.steps."""
    nodes: list[int] = setting(default=[])
    """Numbers of nodes to compare; none: those of the run, or the fewest that the model fits on."""
    global_batches: list[int] = setting(default=[])
    """Sequences a step to compare; none: train.global_batch."""
    deadline_days: float | None = setting(default=None, gt=0)
    """Candidates that take longer are left out."""
    budget: float | None = setting(default=None, gt=0)
    """Money; candidates that cost more are left out. Needs a price."""
    critical_batch_tokens: float | None = setting(default=None, gt=0)
    """Tokens a step beyond which more of them buy less than they cost, as train.noise_scale measures it; None: by a
    law, from the tokens to train on."""

    price_per_gpu_hour: float | None = setting(default=None, gt=0)
    """Of a GPU on demand, or of an allocation; None: costs are told in GPU hours."""
    spot_price_per_gpu_hour: float | None = setting(default=None, gt=0)
    """Of one that the provider may take back (spot, preemptible); None: those are not looked at."""
    spot_interruptions_per_1000_node_days: float | None = setting(default=None, gt=0)
    """Nodes taken back, as the provider or your own history says; needed with the price."""
    spot_notice_seconds: float = setting(default=0.0, ge=0)
    """Between the warning and the end: 120 at AWS, 30 at Google Cloud and Azure. A save that takes longer is lost."""
    spot_wait_minutes: float = setting(default=0.0, ge=0)
    """Until there is another node, before the restart."""

    failures_per_1000_node_days: float | None = setting(default=None, gt=0)
    """Of nodes, as the site counts them; None: from failure_logs, or else from what other sites have published."""
    failure_logs: list[str] = setting(default=[])
    """This site's own history: `sacct --parsable2` with its header, directories of earlier runs, or events.jsonl."""
    planned_interruptions_per_day: float = setting(default=0.0, ge=0)
    """Of the job, announced, so that it saves before: maintenance, a time limit."""
    detection_minutes: float = setting(default=5.0, ge=0)
    """From a failure to the end of the job's other ranks; a crash takes seconds, a hang launch.timeout_seconds."""
    restart_minutes: float | None = setting(default=None, ge=0)
    """From there to the first new step: nodes, the start of all ranks, reading the checkpoint. None: as the runs of
    failure_logs have taken (median), else 5; MegaScale (Jiang et al. 2024, arXiv:2402.15627, section 6.3) finds and
    tests in less than ten minutes, which the two add up to."""
    spare_nodes: int = setting(default=0, ge=0)
    """Kept idle beside those of the job, and paid for."""
    repair_hours: float | None = setting(default=None, gt=0)
    """How long a failed node is away; None: another one is always free."""

    checkpoint_stall_seconds: float | None = setting(default=None, ge=0)
    """Training stops so long for a save, as events.jsonl of a run tells it (`stall`); None: from
    cluster.node.pcie_gb_s."""
    checkpoint_seconds: float | None = setting(default=None, gt=0)
    """From the beginning of a save until it can be resumed from (`seconds` there); None: from
    cluster.filesystem.write_gb_s."""

    energy: EnergyConfig = setting(default=EnergyConfig)
    storage: StorageConfig = setting(default=StorageConfig)


@schema
class RunConfig:
    """One run: a group of conf/ for each field but `train`, `plan`, `run_dir` and `schema_version`."""

    cluster: ClusterConfig = setting(default=ClusterConfig)
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    parallel: ParallelConfig = setting(default=ParallelConfig)
    optim: OptimConfig = setting(default=OptimConfig)
    precision: PrecisionConfig = setting(default=PrecisionConfig)
    checkpoint: CheckpointConfig = setting(default=CheckpointConfig)
    launch: LaunchConfig = setting(default=LaunchConfig)
    container: ContainerConfig = setting(default=ContainerConfig)
    resilience: ResilienceConfig = setting(default=ResilienceConfig)
    loggers: LoggersConfig = setting(default=LoggersConfig)
    train: TrainConfig = setting(default=TrainConfig)
    plan: PlanConfig = setting(default=PlanConfig)
    run_dir: str | None = None
    """None: runs/<date>/<time>. A directory that holds a run continues it."""
    schema_version: int = setting(default=1, ge=1, le=1)
    """Version of this schema, kept in config.yaml so that a later release knows what it reads."""
