"""TensorBoard's event file, one event a step: torch's SummaryWriter writes one a value, 1 % of a small model's step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]


class Board:
    """Scalars over steps, written in the background."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        """What an earlier attempt wrote for steps after `resumed_at`, which are done again, is not shown any more."""
        self._writer = EventFileWriter(str(folder))
        self._add(resumed_at + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, record: dict[str, Any]) -> None:
        """Every number of `record` but `step`, at that step."""
        known = {key: value for key, value in record.items() if key != "step" and value is not None}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in known.items()]
        self._add(record["step"], summary=Summary(value=values))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
