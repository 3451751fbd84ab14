"""Write TensorBoard's event file: one event per step, without a thread of its own.

torch's SummaryWriter writes one event for each value, from a thread that contends for the interpreter: about 1 % of the
step of a small model.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from hpc_train.errors import UserError

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 10.0


class TensorBoardWriter:
    """Writes scalars by step to a new event file."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        """Start a file; TensorBoard hides what an earlier attempt wrote for steps after `resumed_at`.

        Raises UserError if it cannot be made.
        """
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # sorted by age
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("wb")
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}; move it away, or set train.tensorboard=false") from error
        self._failed = False
        self._records = RecordWriter(self._file)
        self._flushed = time.monotonic()
        self._add(0, file_version="brain.Event:2")
        self._add(resumed_at + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, record: Mapping[str, Any]) -> None:
        """Write every number of `record` at its `step`; None is left out."""
        scalars = {key: value for key, value in record.items() if key != "step" and value is not None}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
        self._add(record["step"], summary=Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            with self._end_on_errors():
                self._file.flush()
            self._flushed = time.monotonic()

    def close(self, failed: bool = False) -> None:
        """Flush and close the file."""
        with self._end_on_errors():
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        if not self._failed:
            with self._end_on_errors():
                self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())

    @contextmanager
    def _end_on_errors(self) -> Iterator[None]:
        """Stop writing the file at the first error, without ending the run: nothing after a torn record can be read."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                _log.warning("%s: %s; TensorBoard sees no later steps of this attempt", self._file.name, error.strerror)
            self._failed = True
