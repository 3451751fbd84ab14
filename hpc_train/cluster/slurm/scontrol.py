"""Asking Slurm itself for its topology."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from hpc_train.cluster.slurm import show
from hpc_train.cluster.spec import Cluster

COMMAND = ("scontrol", "show", "topology")
SECONDS = 10.0


def show_topology(command: Sequence[str] = COMMAND, timeout: float = SECONDS) -> Cluster | None:
    """The cluster as `scontrol show topology` prints it, asked once; for one process of a job, never for every rank.

    None where Slurm has no topology (topology/flat prints nothing), does not answer within `timeout` seconds, or is
    not there. Raises UserError for an answer that cannot be understood.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_TOPO_LEN"}
    try:
        said = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = said.stdout.decode("utf-8", "replace")
    if said.returncode or not show.matches(text):
        return None
    return show.read(text, " ".join(command))
