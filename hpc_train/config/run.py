"""RunConfig, the root of the schema, and its `plan` part: what `hpc-train plan` is asked for."""

from __future__ import annotations

from dataclasses import asdict, replace

from omegaconf import MISSING

from hpc_train.config.adapter import AdapterConfig
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.launch import ContainerConfig, LaunchConfig
from hpc_train.config.loggers import LoggersConfig
from hpc_train.config.model import DataConfig, ModelConfig
from hpc_train.config.optim import OptimConfig
from hpc_train.config.parallel import Degrees, ParallelConfig, SyncConfig
from hpc_train.config.profile import ProfileConfig
from hpc_train.config.resilience import ResilienceConfig
from hpc_train.config.schema import config_dataclass, config_field
from hpc_train.config.train import CheckpointConfig, PrecisionConfig, TrainConfig


@config_dataclass
class EnergyConfig:
    """Electricity. No figure has a default: they differ by site, and a wrong one looks like a fact."""

    watts_per_gpu: float | None = config_field(default=None, gt=0)
    """Mean power of a GPU with its share of the node during training; None: energy is left out."""
    pue: float | None = config_field(default=None, ge=1)
    """Power usage effectiveness of the building: its total power over that of its computers. None: computers only."""
    price_per_kwh: float | None = config_field(default=None, gt=0)
    """Price of electricity, if it is not included in the price of GPU hours."""
    co2_grams_per_kwh: float | None = config_field(default=None, gt=0)
    """Carbon dioxide per kWh at the site, grams; None: emissions are left out."""


@config_dataclass
class StorageConfig:
    """Paid storage of a run: its size and its price."""

    tib: float | None = config_field(default=None, gt=0)
    """TiB that are stored all the time; None: the size of the checkpoints that are kept."""
    price_per_tib_month: float | None = config_field(default=None, gt=0)
    """Price of one TiB for a month; None: the cost of storage is left out."""


@config_dataclass
class PlanConfig:
    """Goals, prices and the reliability of a machine; prices are in any one currency."""

    objective: str = config_field(default="time", choices=("time", "cost", "loss"))
    """Value by which candidates are ranked. time: duration of the run, with failures; cost: money, or GPU hours without
    a price; loss: time to the same loss, which makes batch sizes comparable."""
    tokens: float | None = config_field(default=None, gt=0)
    """Tokens to train on; None: those of train.steps."""
    nodes: list[int] = config_field(default=[])
    """Numbers of nodes to compare; empty: those of the run, or the fewest that the model fits on."""
    global_batches: list[int] = config_field(default=[])
    """Global batches to compare, in sequences; empty: train.global_batch."""
    deadline_days: float | None = config_field(default=None, gt=0)
    """Leave out candidates that take more days."""
    budget: float | None = config_field(default=None, gt=0)
    """Leave out candidates that cost more money. Needs a price."""
    critical_batch_tokens: float | None = config_field(default=None, gt=0)
    """Critical batch size in tokens, beyond which larger batches have diminishing returns, as train.noise_scale
    measures it; None: by a scaling law, from the tokens to train on."""

    expert_imbalance: float = config_field(default=1.0, ge=1)
    """Tokens of the rank with the busiest experts over the mean, with parallel.ep; 1: even loads. `expert_imbalance` in
    a run's metrics.jsonl, which is that of the busiest expert, is an upper bound."""

    price_per_gpu_hour: float | None = config_field(default=None, gt=0)
    """Price of an hour of a GPU, on demand or in an allocation; None: costs are given in GPU hours."""
    spot_price_per_gpu_hour: float | None = config_field(default=None, gt=0)
    """Price of an hour of a GPU that the provider may take back (spot, preemptible); None: spot is left out."""
    spot_interruptions_per_1000_node_days: float | None = config_field(default=None, gt=0)
    """Rate at which spot nodes are taken back, from the provider or your own history; needed with the spot price."""
    spot_notice_seconds: float = config_field(default=0.0, ge=0)
    """Seconds between the notice and the end of a spot node: 120 at AWS, 30 at Google Cloud and Azure. A save that
    takes longer is lost."""
    spot_wait_minutes: float = config_field(default=0.0, ge=0)
    """Minutes until another spot node is available, before the restart."""

    failures_per_1000_node_days: float | None = config_field(default=None, gt=0)
    """Failure rate of nodes, as counted at the site; None: from failure_logs, else from rates that other sites
    published."""
    failure_logs: list[str] = config_field(default=[])
    """This site's own history: `sacct --parsable2` with its header, directories of earlier runs, or events.jsonl."""
    planned_interruptions_per_day: float = config_field(default=0.0, ge=0)
    """Announced interruptions of the job, before which it saves: maintenance, a time limit."""
    detection_minutes: float | None = config_field(default=None, ge=0)
    """Minutes from a failure until it is noticed: seconds for a crash, the deadline of a step for a hang. None: the
    median of the runs in failure_logs, else 5."""
    restart_minutes: float | None = config_field(default=None, ge=0)
    """Minutes from there to the first new step: getting nodes, starting all ranks, reading the checkpoint. None: the
    median of the runs in failure_logs, else 5. With detection_minutes that makes 10; MegaScale needs less than that to
    detect a fault and test nodes (Jiang et al. 2024, arXiv:2402.15627, section 6.3)."""
    spare_nodes: int = config_field(default=0, ge=0)
    """Number of idle nodes that the job reserves and pays for."""
    repair_hours: float | None = config_field(default=None, gt=0)
    """Hours until a failed node is back; None: another node is always free."""

    checkpoint_stall_seconds: float | None = config_field(default=None, ge=0)
    """Seconds for which training stops for a save (`stall` in a run's events.jsonl); None: from
    cluster.node.pcie_gb_s."""
    checkpoint_seconds: float | None = config_field(default=None, gt=0)
    """Seconds from the start of a save until a job can resume from it (`seconds` there); None: from
    cluster.filesystem.write_gb_s."""

    energy: EnergyConfig = config_field(default=EnergyConfig)
    storage: StorageConfig = config_field(default=StorageConfig)


@config_dataclass
class RunConfig:
    """One run: a group of conf/ for each field but `train`, `plan`, `profile`, `run_dir` and `schema_version`."""

    cluster: ClusterConfig = config_field(default=ClusterConfig)
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    parallel: ParallelConfig = config_field(default=ParallelConfig)
    adapter: AdapterConfig = config_field(default=AdapterConfig)
    optim: OptimConfig = config_field(default=OptimConfig)
    precision: PrecisionConfig = config_field(default=PrecisionConfig)
    checkpoint: CheckpointConfig = config_field(default=CheckpointConfig)
    launch: LaunchConfig = config_field(default=LaunchConfig)
    container: ContainerConfig = config_field(default=ContainerConfig)
    resilience: ResilienceConfig = config_field(default=ResilienceConfig)
    loggers: LoggersConfig = config_field(default=LoggersConfig)
    train: TrainConfig = config_field(default=TrainConfig)
    plan: PlanConfig = config_field(default=PlanConfig)
    profile: ProfileConfig = config_field(default=ProfileConfig)
    run_dir: str | None = None
    """Run directory; None: runs/<date>/<time>. If it has a run already, that run is continued."""
    schema_version: int = config_field(default=1, ge=1, le=1)
    """Version of this schema, kept in config.yaml so that a later release knows what it reads."""


def is_loose(config: RunConfig) -> bool:
    """Return whether the copies of the model train on their own between exchanges."""
    return config.parallel.sync.every is not None


def describe_one_copy(config: RunConfig, degrees: Degrees) -> tuple[RunConfig, Degrees]:
    """Return the configuration and the degrees of a single copy, which trains on its share of the global batch."""
    one_copy = replace(degrees, dp_replicate=1)
    batch = config.train.global_batch // degrees.dp_replicate
    parallel = replace(config.parallel, sync=SyncConfig(), auto=False, **asdict(one_copy))
    return replace(config, parallel=parallel, train=replace(config.train, global_batch=batch)), one_copy
