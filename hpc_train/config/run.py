"""RunConfig: the whole of one run, the root of the schema."""

from __future__ import annotations

from omegaconf import MISSING

from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.container import ContainerConfig
from hpc_train.config.data import DataConfig
from hpc_train.config.launch import LaunchConfig
from hpc_train.config.model import ModelConfig
from hpc_train.config.optim import OptimConfig
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.plan import PlanConfig
from hpc_train.config.schema import schema, setting
from hpc_train.config.train import CheckpointConfig, PrecisionConfig, TrainConfig


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
    train: TrainConfig = setting(default=TrainConfig)
    plan: PlanConfig = setting(default=PlanConfig)
    run_dir: str | None = None
    """None: runs/<date>/<time>. A directory that holds a run continues it."""
    schema_version: int = setting(default=1, ge=1, le=1)
    """Version of this schema, kept in config.yaml so that a later release knows what it reads."""
