"""Report a run while it trains, from rank 0: metrics, events, loggers, progress, and lines for people."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.training.records.progress_display import Progress, make_progress
from hpc_train.training.records.run_records import LineFile, MetricsFile, format_event
from hpc_train.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from hpc_train.training.loggers.interface import Logger


def _open_events(path: Path) -> LineFile:
    try:
        return LineFile(path)
    except OSError as error:
        reason = "it is not a regular file" if error.errno == errno.ENXIO else error.strerror
        raise UserError(f"{path}: {reason}; move it away, or give another run_dir") from error


@dataclass
class Reporter:
    """Writes metrics, events and progress of a run. On ranks other than 0 every method does nothing."""

    directory: RunDirectory
    attempt: int
    metrics: MetricsFile | None = None
    events: LineFile | None = None
    bar: Progress | None = None
    loggers: list[Logger] = field(default_factory=list)
    warned: bool = False

    @classmethod
    def start(
        cls, config: RunConfig, directory: RunDirectory, attempt: int, steps: int, resumed_at: int, rank: int
    ) -> Reporter:
        """Make a reporter that writes on rank 0 and is silent on other ranks."""
        if rank != 0:
            return cls(directory, attempt)
        loggers: list[Logger] = []
        if config.train.tensorboard:
            from hpc_train.training.loggers.tensorboard_writer import TensorBoardWriter

            loggers.append(TensorBoardWriter(directory.path / "tensorboard", resumed_at))
        if config.loggers.use:
            from hpc_train.training.loggers.start import start_loggers

            loggers += start_loggers(config, directory, attempt, resumed_at)
        bar = make_progress(steps, config.train.log_every)
        metrics = MetricsFile(directory.metrics, resumed_at)
        return cls(directory, attempt, metrics, _open_events(directory.events), bar, loggers)

    def report_step(self, record: dict[str, Any]) -> None:
        """Report one step. The optional fields leave out numbers that are None."""
        if self.metrics is None:
            return
        optional = ("noise_scale", "validation_loss", "skipped")
        record = {key: value for key, value in record.items() if value is not None or key not in optional}
        self.metrics.write(record)
        if self.bar is not None:
            self.bar.show(record)
        self._log(record)

    def report_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Add the results of an evaluation to a step that an earlier attempt has reported."""
        if self.metrics is None:
            return
        self.metrics.amend(step, **values)
        self._log({"step": step, **values})

    def _log(self, record: dict[str, Any]) -> None:
        for logger in self.loggers:
            logger.add(record)

    def warn_of_large_batch(self, critical: float, batch: int) -> None:
        """Warn, once, if the global batch exceeds the estimated critical batch; both in sequences."""
        if batch > critical and not self.warned:
            self.warned = True
            self.say(
                f"train.global_batch={batch} exceeds the estimated critical batch (about {critical:.0f} sequences, by "
                "the gradient noise scale): diminishing returns"
            )

    def add_event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl."""
        if self.events is not None:
            self.events.append(format_event(kind, self.attempt, **fields))

    def say(self, text: str, last: bool = False) -> None:
        """Print a line for people to this rank's log, and record it as an event for commands that follow the run.

        last: the run has ended, so the progress bar is closed first.
        """
        if self.metrics is not None:
            if last and self.bar is not None:
                self.bar.close()
            print(text, flush=True)
            self.add_event("note", text=text, last=last)

    def mark_requeue(self) -> None:
        """Tell the batch script that this attempt has saved, so that it requeues the job."""
        if self.metrics is not None:
            self.directory.requeue_marker(self.attempt).touch()

    def mark_done(self) -> None:
        """Tell the batch script that the run is done."""
        if self.metrics is not None:
            self.directory.done_marker(self.attempt).touch()

    def close_loggers(self, failed: bool = False) -> None:
        """End all loggers. Those in processes of their own get loggers.close_seconds in all. failed: by an error."""
        if self.loggers:
            from hpc_train.training.loggers.start import close_loggers

            close_loggers(self.loggers, failed)
            self.loggers.clear()

    def close(self) -> None:
        """Flush and close all outputs. Loggers that are still open learn that the run has failed."""
        self.close_loggers(failed=True)
        if self.metrics is not None:
            self.metrics.close()
        if self.events is not None:
            self.events.close()
        if self.bar is not None:
            self.bar.close()
        sys.stdout.flush()
