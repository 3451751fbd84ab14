"""Our own training as the task function of a Hydra application, for sweepers that want a number back, as Optuna's.

register()

@hydra.main(version_base="1.3", config_path="pkg://hpc_train.conf", config_name="config")
def main(config): return train(config)
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.checks.secret_variables import refuse_secret_variables
from hpc_train.config.compose import explain_error, register
from hpc_train.config.plain_config import config_from_dict
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.launch.command_output import CommandOutput
from hpc_train.runtime import stop_request

__all__ = ["register", "train"]
_RUN = "run"


def train(config: DictConfig) -> float:
    """Train on all ranks that call it; returns the last validation loss, or else the last loss.

    The run directory is `run` in the output directory of the point. A stop signal saves and leaves with SystemExit, so
    that the launcher runs the point again, which continues from there. Raises UserError.
    """
    container = _resolve(config)
    container["run_dir"] = str(container.get("run_dir") or Path(HydraConfig.get().runtime.output_dir) / _RUN)
    logging.getLogger("hpc_train").setLevel(logging.INFO)
    before = {number: signal.getsignal(number) for number in (*stop_request.STOP_SIGNALS, signal.SIGINT)}
    try:
        # From now on the training loop acts on stop signals: it saves before it stops.
        code = _train_ranks(container, stop_request.install_stop_handlers())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code != EXIT_DONE:
        raise SystemExit(code)
    return _read_last_loss(Path(container["run_dir"]))


def _resolve(config: DictConfig) -> dict[str, Any]:
    """Resolve the configuration. Raises UserError if a value is a secret variable, or cannot be resolved."""
    try:
        with refuse_secret_variables():
            container: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(explain_error(error, (), None)) from error
    return container


def _train_ranks(container: dict[str, Any], request: stop_request.StopRequest) -> int:
    from hpc_train.launch.train_as_rank import share_spec
    from hpc_train.runtime.start import join
    from hpc_train.training.rank import run_rank

    config = config_from_dict(container)
    timeout = timedelta(seconds=config.launch.timeout_seconds)
    meeting = timedelta(seconds=config.launch.rendezvous_seconds)
    task = join(os.environ, config.cluster.fabric.interface, timeout, meeting)
    answer = share_spec(config, task, CommandOutput(print, lambda text: print(text, file=sys.stderr)))
    if answer.spec is None:
        return EXIT_DONE
    return run_rank(answer.spec.run_config(), task, answer.spec.folder(), answer.attempt, request)


def read_point_warnings(output_dir: Path) -> list[str]:
    """Return what the ranks of the newest attempt of a point warned of; [] if the point is no training of ours."""
    from hpc_train.training.records.warning_files import read_warnings

    logs = output_dir / _RUN / "logs"
    attempts = [int(path.name) for path in logs.glob("*/") if path.name.isdecimal()] if logs.is_dir() else []
    return [str(warning) for warning in read_warnings(logs / str(max(attempts)))] if attempts else []


def _read_last_loss(run: Path) -> float:
    from hpc_train.launch.state.progress import read_final_values

    values = read_final_values(run / "metrics.jsonl")
    return float(values.get("validation_loss", values.get("loss", "nan")))
