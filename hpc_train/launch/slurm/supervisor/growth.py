"""Ask Slurm for the missing nodes of a run that continues on fewer nodes (resilience.elastic)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.launch.watching import WatchSettings
from hpc_train.regular_files import read_json
from hpc_train.training.records.run_records import append_event


def count_ranks_per_node(spec: Mapping[str, Any]) -> int:
    """Return the ranks of each node. spec: the job.json of the run."""
    node = spec["config"]["cluster"]["node"]
    return int(node["ranks"] or max(int(node["gpus"]), 1))


class GrowthCheck:
    """Asks Slurm from time to time for the missing nodes of a run that continues on fewer (resilience.elastic)."""

    def __init__(self, logs: Path, nodes: Sequence[str], seconds: float) -> None:
        """logs: log directory of the attempt. nodes: those that the ranks are on.

        seconds: between two questions; 0: nothing is asked.
        """
        spec = read_json(logs.parents[1] / "job.json")
        self.wanted = int(spec["ranks"]) // count_ranks_per_node(spec)
        self._words = [sys.executable, "-P", "-m", "hpc_train.launch.slurm.waiting_time", str(logs), ",".join(nodes)]
        self._seconds = seconds if len(nodes) < self.wanted else 0.0
        self._next = time.monotonic() + self._seconds
        self._question: subprocess.Popen[bytes] | None = None

    def finds_nodes(self) -> bool:
        """Return whether Slurm has the missing nodes; never waits for the answer.

        If it has, the question has left in the log directory what a requeue asks for.
        """
        if self._question is not None:
            code = self._question.poll()
            if code is not None:
                self._question, self._next = None, time.monotonic() + self._seconds
            return code == 0
        if self._seconds and time.monotonic() > self._next:
            self._question = subprocess.Popen(self._words, stdin=subprocess.DEVNULL)
        return False

    def close(self) -> None:
        """End a question that was not answered."""
        if self._question is not None:
            self._question.kill()
            self._question.wait()


def report_growth(logs: Path, nodes: int, wanted: int, settings: WatchSettings) -> None:
    """Write down that the job is about to be requeued for all of its nodes."""
    text = f"the run has {nodes} of its {wanted} nodes, and the others are free now"
    action = "asked to save and stop" if settings.act else "left alone: resilience.act=false"
    append_event(logs.parents[1] / "events.jsonl", "grow", int(logs.name), why=text, action=action)
