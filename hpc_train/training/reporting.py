"""Everything a run tells about itself, by its rank 0: metrics, events, TensorBoard, progress, words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_train.config.run import RunConfig
from hpc_train.training.folder import RunFolder
from hpc_train.training.progress import Progress, progress
from hpc_train.training.records import Metrics, add_event

if TYPE_CHECKING:
    from hpc_train.training.board import Board


@dataclass
class Reporter:
    """On ranks other than 0 every method does nothing."""

    folder: RunFolder
    attempt: int
    metrics: Metrics | None = None
    board: Board | None = None
    bar: Progress | None = None
    warned: bool = False

    @classmethod
    def start(
        cls, config: RunConfig, folder: RunFolder, attempt: int, steps: int, resumed_at: int, rank: int
    ) -> Reporter:
        """A reporter that writes on rank 0 and is silent elsewhere."""
        if rank != 0:
            return cls(folder, attempt)
        board = None
        if config.train.tensorboard:
            from hpc_train.training.board import Board

            board = Board(folder.path / "tensorboard", resumed_at)
        bar = progress(steps, config.train.log_every)
        return cls(folder, attempt, Metrics(folder.metrics, resumed_at), board, bar)

    def step(self, record: dict[str, Any]) -> None:
        """One step's numbers; those that are not known are left out of TensorBoard and of the optional fields."""
        if self.metrics is None:
            return
        optional = ("noise_scale", "validation_loss")
        record = {key: value for key, value in record.items() if value is not None or key not in optional}
        self.metrics.write(record)
        if self.bar is not None:
            self.bar.show(record)
        if self.board is not None:
            self.board.add(record)

    def validated(self, step: int, loss: float) -> None:
        """The validation loss of a step whose other numbers an earlier attempt has written."""
        if self.metrics is None:
            return
        self.metrics.amend(step, validation_loss=loss)
        if self.board is not None:
            self.board.add({"step": step, "validation_loss": loss})

    def noise(self, critical: float, batch: int) -> None:
        """Warn once when the batch is past the critical one."""
        if batch > critical and not self.warned:
            self.warned = True
            self.say(
                f"train.global_batch={batch} is past the critical batch of about {critical:.0f} sequences "
                "(gradient noise scale): more of it buys less than it costs"
            )

    def event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl."""
        if self.metrics is not None:
            add_event(self.folder.events, kind, self.attempt, **fields)

    def say(self, text: str, last: bool = False) -> None:
        """A line for a person: in this rank's log, and as an event for whoever follows the run."""
        if self.metrics is not None:
            if last and self.bar is not None:
                self.bar.close()
            print(text, flush=True)
            self.event("note", text=text, last=last)

    def mark_requeue(self) -> None:
        """Tell the batch script that this attempt saved and may go on in another one."""
        if self.metrics is not None:
            self.folder.requeue_marker(self.attempt).touch()

    def mark_done(self) -> None:
        """Tell the batch script that the run has come to its end."""
        if self.metrics is not None:
            self.folder.done_marker(self.attempt).touch()

    def close(self) -> None:
        """Flush and close all of them."""
        if self.metrics is not None:
            self.metrics.close()
        if self.bar is not None:
            self.bar.close()
        if self.board is not None:
            self.board.close()
        sys.stdout.flush()
