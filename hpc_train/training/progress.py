"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """Shows records of metrics.jsonl as they come."""

    def show(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def progress(steps: int, every: int, stream: TextIO | None = None) -> Progress:
    """Rich's progress bar if `stream` (default: stdout) is a terminal, else a line every `every` steps."""
    stream = stream or sys.stdout
    return LiveProgress(steps, stream) if stream.isatty() else PlainProgress(steps, every, stream)


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def describe(record: dict[str, Any]) -> str:
    """Loss, speed and what else is known of one step, in a few words."""
    parts = [f"loss {record['loss']:.4f}" if record["loss"] is not None else "loss not finite"]
    if record.get("validation_loss") is not None:
        parts.append(f"validation {record['validation_loss']:.4f}")
    parts.append(f"lr {record['lr']:.2e}")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(parts)


class PlainProgress:
    """One line every few steps, for logs."""

    def __init__(self, steps: int, every: int, stream: TextIO) -> None:
        self._steps, self._every, self._stream = steps, every, stream

    def show(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if step > 1 and step % self._every and step != self._steps and record.get("validation_loss") is None:
            return
        left = (self._steps - step) * record["step_seconds"]
        width = len(str(self._steps))
        print(
            f"step {step:>{width}}/{self._steps}  {describe(record)}  left {clock(left)}", file=self._stream, flush=True
        )

    def close(self) -> None:
        """Nothing to end."""


class LiveProgress:
    """A bar, the newest numbers and the time left, in place; validation losses stay on the screen."""

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
        self._bar.update(self._task, completed=record["step"], description=describe(record))
        if record.get("validation_loss") is not None:
            self._bar.console.print(f"step {record['step']}  {describe(record)}", highlight=False)

    def close(self) -> None:
        self._bar.stop()
