"""RunConfig, the root of the schema, and its `plan` part: what `hpc-train plan` is asked for."""

from __future__ import annotations

from omegaconf import MISSING

from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.launch import ContainerConfig, LaunchConfig
from hpc_train.config.model import DataConfig, ModelConfig
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.resilience import ResilienceConfig
from hpc_train.config.schema import config_dataclass, config_field
from hpc_train.config.train import CheckpointConfig, OptimConfig, PrecisionConfig, TrainConfig


@config_dataclass
class EnergyConfig:
    """Electricity. No figure has a default: they differ by site, and a wrong one looks like a fact."""

    watts_per_gpu: float | None = config_field(default=None, gt=0)
    """Mean draw of a GPU with its share of the node while it trains; None: energy is not told."""
    pue: float | None = config_field(default=None, ge=1)
    """Power usage effectiveness of the building: what it draws over what its computers draw. None: computers alone."""
    price_per_kwh: float | None = config_field(default=None, gt=0)
    """Only where electricity is paid beside the GPU hours."""
    co2_grams_per_kwh: float | None = config_field(default=None, gt=0)
    """Carbon dioxide of one kWh at the site, grams; None: emissions are not reckoned."""


@config_dataclass
class StorageConfig:
    """What is kept of a run on paid storage."""

    tib: float | None = config_field(default=None, gt=0)
    """Held all the time; None: the checkpoints that are kept."""
    price_per_tib_month: float | None = config_field(default=None, gt=0)
    """None: storage is not told."""


@config_dataclass
class PlanConfig:
    """Goals, prices and the reliability of a machine; prices are in any one currency."""

    objective: str = config_field(default="time", choices=("time", "cost", "loss"))
    """What candidates are ranked by. time: of the run, failures counted; cost: money, or GPU hours where there is no
    price; loss: time to the same loss, which tells batches apart."""
    tokens: float | None = config_field(default=None, gt=0)
    """Tokens to train on; None: those of train.steps."""
    nodes: list[int] = config_field(default=[])
    """Numbers of nodes to compare; none: those of the run, or the fewest that the model fits on."""
    global_batches: list[int] = config_field(default=[])
    """Sequences a step to compare; none: train.global_batch."""
    deadline_days: float | None = config_field(default=None, gt=0)
    """Candidates that take longer are left out."""
    budget: float | None = config_field(default=None, gt=0)
    """Money; candidates that cost more are left out. Needs a price."""
    critical_batch_tokens: float | None = config_field(default=None, gt=0)
    """Tokens a step beyond which more of them buy less than they cost, as train.noise_scale measures it; None: by a
    law, from the tokens to train on."""

    price_per_gpu_hour: float | None = config_field(default=None, gt=0)
    """Of a GPU on demand, or of an allocation; None: costs are told in GPU hours."""
    spot_price_per_gpu_hour: float | None = config_field(default=None, gt=0)
    """Of one that the provider may take back (spot, preemptible); None: those are not looked at."""
    spot_interruptions_per_1000_node_days: float | None = config_field(default=None, gt=0)
    """Nodes taken back, as the provider or your own history says; needed with the price."""
    spot_notice_seconds: float = config_field(default=0.0, ge=0)
    """Between the warning and the end: 120 at AWS, 30 at Google Cloud and Azure. A save that takes longer is lost."""
    spot_wait_minutes: float = config_field(default=0.0, ge=0)
    """Until there is another node, before the restart."""

    failures_per_1000_node_days: float | None = config_field(default=None, gt=0)
    """Of nodes, as the site counts them; None: from failure_logs, or else from what other sites have published."""
    failure_logs: list[str] = config_field(default=[])
    """This site's own history: `sacct --parsable2` with its header, directories of earlier runs, or events.jsonl."""
    planned_interruptions_per_day: float = config_field(default=0.0, ge=0)
    """Of the job, announced, so that it saves before: maintenance, a time limit."""
    detection_minutes: float = config_field(default=5.0, ge=0)
    """From a failure to the end of the job's other ranks; a crash takes seconds, a hang launch.timeout_seconds."""
    restart_minutes: float | None = config_field(default=None, ge=0)
    """From there to the first new step: nodes, the start of all ranks, reading the checkpoint. None: as the runs of
    failure_logs have taken (median), else 5; MegaScale (Jiang et al. 2024, arXiv:2402.15627, section 6.3) finds and
    tests in less than ten minutes, which the two add up to."""
    spare_nodes: int = config_field(default=0, ge=0)
    """Kept idle beside those of the job, and paid for."""
    repair_hours: float | None = config_field(default=None, gt=0)
    """How long a failed node is away; None: another one is always free."""

    checkpoint_stall_seconds: float | None = config_field(default=None, ge=0)
    """Training stops so long for a save, as events.jsonl of a run tells it (`stall`); None: from
    cluster.node.pcie_gb_s."""
    checkpoint_seconds: float | None = config_field(default=None, gt=0)
    """From the beginning of a save until it can be resumed from (`seconds` there); None: from
    cluster.filesystem.write_gb_s."""

    energy: EnergyConfig = config_field(default=EnergyConfig)
    storage: StorageConfig = config_field(default=StorageConfig)


@config_dataclass
class RunConfig:
    """One run: a group of conf/ for each field but `train`, `plan`, `run_dir` and `schema_version`."""

    cluster: ClusterConfig = config_field(default=ClusterConfig)
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    parallel: ParallelConfig = config_field(default=ParallelConfig)
    optim: OptimConfig = config_field(default=OptimConfig)
    precision: PrecisionConfig = config_field(default=PrecisionConfig)
    checkpoint: CheckpointConfig = config_field(default=CheckpointConfig)
    launch: LaunchConfig = config_field(default=LaunchConfig)
    container: ContainerConfig = config_field(default=ContainerConfig)
    resilience: ResilienceConfig = config_field(default=ResilienceConfig)
    train: TrainConfig = config_field(default=TrainConfig)
    plan: PlanConfig = config_field(default=PlanConfig)
    run_dir: str | None = None
    """None: runs/<date>/<time>. A directory that holds a run continues it."""
    schema_version: int = config_field(default=1, ge=1, le=1)
    """Version of this schema, kept in config.yaml so that a later release knows what it reads."""
