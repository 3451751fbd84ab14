"""Show the progress of a run while it trains: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO


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
