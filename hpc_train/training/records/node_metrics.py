"""Write the newest metrics of a run as a text file on each node, for the textfile collector of node_exporter.

The file is valid OpenMetrics 1.0 and valid in Prometheus' text format 0.0.4, which node_exporter reads: all metrics are
gauges, and the two formats write these alike. A thread writes, so that a folder that does not answer stops no rank.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Task
from hpc_train.regular_files import open_to_read, parse_json_object, read_text, replace_file
from hpc_train.resilience.heartbeat import Heartbeat
from hpc_train.resilience.ledger import GOODPUT, LedgerLine, Period, account_run, parse_ledger, sum_activities
from hpc_train.resilience.restart import Action
from hpc_train.training.run_directory import RunDirectory

_log = logging.getLogger(__name__)
_FROM_RECORD = {
    "step": ("step", "Optimizer updates made so far."),
    "loss": ("loss", "Training loss of the newest step, mean per token."),
    "validation_loss": ("validation_loss", "Newest validation loss, mean per token."),
    "grad_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "lr": ("learning_rate", "Learning rate of the newest step."),
    "tokens_per_second": ("tokens_per_second", "Tokens a second, over all ranks."),
    "step_seconds": ("step_seconds", "Duration of the newest step."),
    "data_seconds": ("data_seconds", "Part of step_seconds that this node's first rank waited for data."),
    "expert_imbalance": ("expert_imbalance_ratio", "Load of the busiest expert over the mean; absent without experts."),
    "mfu": ("mfu_ratio", "Model FLOP utilisation; absent where the peak of the GPU is not known."),
}
"""Key of metrics.jsonl -> metric without its prefix, and what it means."""
_HELP = {
    "run_info": "Always 1; its labels describe the run.",
    "steps": "Optimizer updates of the whole run.",
    "goodput_ratio": "Share of the time on nodes, over all attempts so far, that went into steps that count.",
    "restarts": "Starts of the ranks after the first one.",
    "updated_timestamp_seconds": "When this file was written.",
    **dict(_FROM_RECORD.values()),
}
_TAIL_BYTES = 4 << 20
"""Bytes of goodput.jsonl that are read, from its end: about 28,000 lines."""
_LINES_OF_A_PERIOD = 100
"""Lines that are kept of an earlier attempt, about, spread evenly over it."""
_CLOSE_SECONDS = 2.0
_RESTARTED = Action.RESTART.value


class NodeMetrics:
    """The metrics file of one node. It never raises: what goes wrong is a warning, once."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, attempt: int, steps: int, resumed_at: int, task: Task
    ) -> None:
        """Start the thread that writes. steps: of the whole run. resumed_at: step from which this attempt continues."""
        assert config.loggers.textfile_dir is not None
        run_id = hashlib.sha256(str(directory.path).encode()).hexdigest()[:12]
        folder = Path(os.path.expandvars(config.loggers.textfile_dir)).expanduser()
        self._file = MetricsTextFile(folder / f"hpc_train-{run_id}-{task.node}.prom")
        self._labels = {"run": config.loggers.name or directory.path.name, "run_id": run_id}
        self._info = {
            "directory": str(directory.path),
            "model": config.model.name,
            "node": task.host,
            "slurm_job_id": os.environ.get("SLURM_JOB_ID", ""),
            "world_size": str(task.processes),
        }
        self._attempt, self._steps, self._nodes, self._resumed_at = attempt, steps, task.nodes, resumed_at
        self._earlier, self._job = read_earlier_periods(directory, attempt)
        self._validation_loss: float | None = None
        self._interval, self._next = config.loggers.textfile_seconds, 0.0

    def update(self, record: Mapping[str, Any], heartbeat: Heartbeat) -> None:
        """Take the record of a step, and have it written if the last write was long enough ago."""
        if record.get("validation_loss") is not None:
            self._validation_loss = record["validation_loss"]
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval
        self._file.write(self._format({**record, "validation_loss": self._validation_loss}, heartbeat))

    def close(self) -> None:
        """Remove the file: a run that has ended has no newest metrics."""
        self._file.close()

    def _format(self, record: Mapping[str, Any], heartbeat: Heartbeat) -> str:
        values = {name: record.get(key) for key, (name, _) in _FROM_RECORD.items()}
        values |= {
            "steps": self._steps,
            "goodput_ratio": self._measure_goodput(record["step"], heartbeat),
            "restarts": self._attempt,
            "updated_timestamp_seconds": time.time(),
        }
        return format_metrics(values, self._labels, self._info)

    def _measure_goodput(self, step: int, heartbeat: Heartbeat) -> float:
        now, seconds = time.time(), sum_activities(heartbeat)
        line = LedgerLine(self._attempt, now, step, seconds, self._nodes)
        period = Period(
            attempt=self._attempt,
            job=self._job,
            began=now - sum(seconds.values()),
            ended=now,
            nodes=self._nodes,
            resumed=self._resumed_at,
            lines=[line],
        )
        periods = [*self._earlier, period]
        return account_run(periods, periods[0].began, step).goodput


class MetricsTextFile:
    """A file that a thread replaces whole, by rename, with the newest text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text: str | None = None
        self._changed, self._closing, self._warned = threading.Event(), False, False
        self._thread = threading.Thread(target=self._write_until_closed, name="metrics file", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Have this text written, in place of one that is not written yet. Does not wait."""
        self._text = text
        self._changed.set()

    def close(self) -> None:
        """Remove the file. A folder that does not answer for 2 s keeps it."""
        self._closing = True
        self._changed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _write_until_closed(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()  # before the text is taken: one that comes after that sets it again
            if self._closing:
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)
                return
            # Only the newest text is written: a slow folder makes the thread skip some.
            text, self._text = self._text, None
            if text is not None:
                self._replace(text)

    def _replace(self, text: str) -> None:
        try:
            replace_file(self._path, text, mode=0o644)  # node_exporter runs as another user
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("%s: %s; Prometheus sees no metrics of this node", self._path, error.strerror)


def format_metrics(values: Mapping[str, float | None], labels: Mapping[str, str], info: Mapping[str, str]) -> str:
    """Return the text of a metrics file. values: by metric, without the prefix; None is left out."""
    rows = {"run_info": _format_sample("run_info", {**labels, **info}, 1.0)}
    rows |= {name: _format_sample(name, labels, float(value)) for name, value in values.items() if value is not None}
    lines = []
    for name, row in rows.items():
        lines += [f"# HELP hpc_train_{name} {_HELP[name]}", f"# TYPE hpc_train_{name} gauge", row]
    return "\n".join([*lines, "# EOF", ""])


def _format_sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"hpc_train_{name}{{{pairs}}} {_format_value(value)}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _format_value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")


def read_earlier_periods(directory: RunDirectory, attempt: int) -> tuple[list[Period], str]:
    """Return the earlier attempts that came to training, and the name of the allocation of this one.

    As far as goodput.jsonl and events.jsonl tell. Each attempt keeps about 100 lines, since they are accounted for at
    every write.
    """
    resumed, restarted = _read_starts(directory.events)
    periods: list[Period] = []
    lines = _read_ledger_tail(directory.path / GOODPUT)
    for number in sorted({line.attempt for line in lines if line.attempt < attempt}):
        attempt_lines = [line for line in lines if line.attempt == number]
        periods.append(
            Period(
                attempt=number,
                job=_name_job(periods, number, restarted),
                began=attempt_lines[0].time - sum(attempt_lines[0].seconds.values()),
                ended=attempt_lines[-1].time,
                nodes=attempt_lines[-1].nodes,
                resumed=resumed.get(number),
                lines=[*attempt_lines[:: max(1, len(attempt_lines) // _LINES_OF_A_PERIOD)], attempt_lines[-1]],
            )
        )
    return periods, _name_job(periods, attempt, restarted)


def _name_job(before: Sequence[Period], attempt: int, restarted: Collection[int]) -> str:
    """Return the name of the allocation of an attempt: that of the one before, if its ranks were started again."""
    return before[-1].job if before and before[-1].attempt in restarted else f"attempt {attempt}"


def _read_ledger_tail(path: Path) -> list[LedgerLine]:
    try:
        with open_to_read(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return parse_ledger(file.read(_TAIL_BYTES).decode(errors="replace"))
    except OSError:
        return []


def _read_starts(path: Path) -> tuple[dict[int, int], set[int]]:
    """Return the step from which each attempt continued, and the attempts after which the ranks were started again."""
    try:
        rows = read_text(path, errors="replace").splitlines()
    except OSError:
        return {}, set()
    events = [parse_json_object(row) for row in rows]
    starts = [event for event in events if event.get("event") in ("start", "resume")]
    resumed = {event["attempt"]: event["step"] for event in starts if _are_numbers(event, "attempt", "step")}
    restarts = [event for event in events if event.get("event") == "restart" and event.get("action") == _RESTARTED]
    return resumed, {event["attempt"] for event in restarts if _are_numbers(event, "attempt")}


def _are_numbers(event: Mapping[str, Any], *keys: str) -> bool:
    return all(type(event.get(key)) is int for key in keys)
