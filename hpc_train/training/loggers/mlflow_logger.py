"""Log to MLflow: a tracking server, or files. An attempt that resumes a run continues under the same run id."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_train.config.plain_config import flatten_settings
from hpc_train.training.loggers.interface import LoggedRun, read_run_id, write_run_id

_LONGEST_VALUE = 500
"""Characters of a parameter that every store of MLflow takes."""
_PARAMETERS_AT_ONCE = 100
"""MLflow's limit for a request."""
_LOCK_SECONDS = 30.0
_SECONDS_BETWEEN_REQUESTS = 2.0
_METRICS_AT_ONCE = 900
"""MLflow takes 1,000 in a request."""


class MlflowLogger:
    """A run of MLflow."""

    def __init__(self, run: LoggedRun) -> None:
        """Start the run, or continue it. Raises what the library raises, such as for a server that does not answer."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow wants a database
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._make_metric, self._make_parameter = Metric, Param
        store = (run.shared_folder or run.folder) / "mlruns"
        store.mkdir(parents=True, exist_ok=True)
        uri = run.settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI") or store.as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._attempt = run.attempt
        self._waiting: list[Metric] = []
        self._next = 0.0
        run_id = read_run_id(run.folder)
        if run_id is None:
            run_id = self._create_run(run, store)
            write_run_id(run.folder, run_id)
        else:
            self._client.update_run(run_id, "RUNNING")
        self._run_id = run_id

    def _create_run(self, run: LoggedRun, store: Path) -> str:
        with _hold_lock(store.with_name("creating")):
            experiment = self._find_experiment(run.settings["experiment"])
        tags = {"sweep": run.group} if run.group else {}
        tags |= {
            "mlflow.user": _find_user_name(),
            "mlflow.source.type": "JOB",
            **{f"tag.{tag}": "true" for tag in run.tags},
        }
        created = self._client.create_run(experiment, run_name=run.name, tags=tags)
        run_id: str = created.info.run_id
        parameters = [
            self._make_parameter(name, str(value)[:_LONGEST_VALUE])
            for name, value in flatten_settings(run.config).items()
        ]
        for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(run_id, params=parameters[first : first + _PARAMETERS_AT_ONCE])
        return run_id

    def _find_experiment(self, name: str) -> str:
        """Return the id of the experiment of this name, made now if it is not there."""
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            with suppress(MlflowException):  # somebody else has made it meanwhile
                return str(self._client.create_experiment(name))
            experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id)

    def add(self, record: Mapping[str, Any]) -> None:
        """Log one step, in one request with those of the last two seconds."""
        now, step = int(time.time() * 1000), record["step"]
        values = {name: value for name, value in record.items() if value is not None and name != "step"}
        values["attempt"] = self._attempt
        self._waiting += [self._make_metric(name, float(value), now, step) for name, value in values.items()]
        if time.monotonic() >= self._next or len(self._waiting) >= _METRICS_AT_ONCE:
            self._send()

    def close(self, failed: bool = False) -> None:
        """Send what waits, and mark the run as ended."""
        self._send()
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _send(self) -> None:
        for first in range(0, len(self._waiting), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=self._waiting[first : first + _METRICS_AT_ONCE])
        self._waiting.clear()
        self._next = time.monotonic() + _SECONDS_BETWEEN_REQUESTS


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold a lock, so that the points of a sweep do not all make the experiment; after 30 s go on without."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            # mkdir is atomic on every file system; locks are missing on some.
            folder.mkdir()
            break
        except FileExistsError:
            time.sleep(0.05)
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()


def _find_user_name() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
