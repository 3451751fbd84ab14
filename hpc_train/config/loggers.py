"""conf/loggers: where the metrics of a run go in addition to metrics.jsonl."""

from __future__ import annotations

from typing import Any

from hpc_train.config.schema import config_dataclass, config_field


@config_dataclass
class WandbConfig:
    """Weights & Biases. The API key is read by its own library, from WANDB_API_KEY or ~/.netrc."""

    project: str = "hpc_train"
    """Project that the run is listed under."""
    entity: str | None = None
    """User or team that owns the project; None: the default of the account."""
    mode: str = config_field(default="offline", choices=("offline", "online"))
    """offline: write to loggers/wandb in the run directory, for `wandb sync` later. online: upload while training."""


@config_dataclass
class MlflowConfig:
    """MLflow. A password or token of the server is read by its own library, from MLFLOW_TRACKING_TOKEN and the like."""

    tracking_uri: str | None = None
    """Address of the server, or file:/path. None: MLFLOW_TRACKING_URI, else loggers/mlflow in the directory of the run,
    or of its sweep."""
    experiment: str = "hpc_train"
    """Experiment that the run is listed under."""


@config_dataclass
class LoggersConfig:
    """Loggers of a run beside metrics.jsonl and TensorBoard, and the metrics file for Prometheus."""

    use: list[str] = config_field(default=[])
    """csv, wandb, mlflow, or names that an installed package offers as entry points of the group hpc_train.loggers."""
    name: str | None = None
    """What loggers call the run; None: the name of the run directory."""
    group: str | None = None
    """What loggers list the run under, together with others; None: the sweep that the run is a point of."""
    tags: list[str] = config_field(default=[])
    """Words that loggers attach to the run."""
    close_seconds: float = config_field(default=15.0, ge=0, le=3600)
    """How long the end of a run waits for loggers that still upload, after an error no more than 2 s. Then they are
    killed."""
    wandb: WandbConfig = config_field(default=WandbConfig)
    mlflow: MlflowConfig = config_field(default=MlflowConfig)
    args: dict[str, Any] = config_field(default={})
    """Settings for loggers of your own. No secrets: read those from the environment in your own code."""
    textfile_dir: str | None = None
    """Folder of each node that node_exporter's textfile collector reads: a file there has the run's newest metrics, for
    Prometheus. Environment variables in it are those of the node. None: no such file."""
    textfile_seconds: float = config_field(default=10.0, ge=0)
    """Least time between two writes of that file."""
