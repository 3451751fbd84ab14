"""Report a run while it trains, from rank 0: metrics, events, loggers, progress, and lines for people.

A terminal shows a progress bar, a log plain lines.
"""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.training.records.run_records import LineFile, MetricsFile, format_event
from hpc_train.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from hpc_train.training.loggers.interface import Logger


class Progress(Protocol):
    """Shows the records of metrics.jsonl while they are made."""

    def show(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def make_progress(steps: int, interval: int, stream: TextIO | None = None) -> Progress:
    """Make a progress bar if `stream` (default: stdout) is a terminal, else print a line every `interval` steps."""
    stream = stream or sys.stdout
    return LiveProgress(steps, stream) if stream.isatty() else PlainProgress(steps, interval, stream)


def format_clock(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def describe_step(record: dict[str, Any]) -> str:
    """Describe one step on one line: loss, learning rate, speed, and MFU if it is known."""
    parts = [f"loss {record['loss']:.4f}" if record["loss"] is not None else "loss not finite"]
    if record.get("validation_loss") is not None:
        parts.append(f"validation {record['validation_loss']:.4f}")
    for name, value in record.items():
        if name.startswith("validation_") and name != "validation_loss" and value is not None:
            parts.append(f"{name.removeprefix('validation_')} {value:.4g}")
    parts.append(f"lr {record['lr']:.2e}")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record.get("pace"):
        parts.append(record["pace"])
    return "  ".join(parts)


class PlainProgress:
    """Prints one line every few steps, for logs."""

    def __init__(self, steps: int, interval: int, stream: TextIO) -> None:
        self._steps, self._interval, self._stream = steps, interval, stream

    def show(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if step > 1 and step % self._interval and step != self._steps and record.get("validation_loss") is None:
            return
        # From the last step alone; the terminal's bar averages.
        seconds_left = (self._steps - step) * record["step_seconds"]
        width = len(str(self._steps))
        print(
            f"step {step:>{width}}/{self._steps}  {describe_step(record)}  left {format_clock(seconds_left)}",
            file=self._stream,
            flush=True,
        )

    def close(self) -> None:
        """Do nothing: every line is flushed already."""


class LiveProgress:
    """Shows a progress bar with the newest numbers and the time left; validation losses stay on the screen."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            redirect_stderr=sys.stderr.isatty(),  # warnings stay above the bar, and in the file where stderr is one
        )
        self._task = self._bar.add_task("starting", total=steps)
        self._bar.start()

    def show(self, record: dict[str, Any]) -> None:
        self._bar.update(self._task, completed=record["step"], description=describe_step(record))
        if record.get("validation_loss") is not None:
            self._bar.console.print(f"step {record['step']}  {describe_step(record)}", highlight=False)

    def close(self) -> None:
        self._bar.stop()


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
