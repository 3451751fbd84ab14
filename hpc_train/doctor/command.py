"""`hpc-train doctor`: alone on a machine, or as a rank of a job."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.doctor.finding import Finding, as_json, exit_code, lines
from hpc_train.doctor.gpus import gpus
from hpc_train.doctor.limits import limits
from hpc_train.doctor.software import software
from hpc_train.doctor.surroundings import surroundings
from hpc_train.doctor.tools import tools
from hpc_train.runtime.identity import identify

RUNS = "runs"
"""Where run_dir is by default."""


def doctor_command(overrides: Sequence[str], config_dir: str | None, as_text: bool) -> int:
    """Look at everything and print it; 0 where nothing is broken, else 1. In a job rank 0 prints for all.

    Raises UserError for a configuration that cannot be composed, or an environment that makes no sense.
    """
    config = compose(overrides, config_dir)
    me = identify(os.environ)
    if me is None or me.processes == 1:
        findings = node_findings(config, os.environ, socket.gethostname(), nodes=1, local=1)
        show(findings, as_text)
        return exit_code(findings)
    from hpc_train.doctor.job import examine  # needs torch.distributed

    found, code = examine(config, me, os.environ)
    if found is not None:
        show(found, as_text)
    return code


def show(findings: Sequence[Finding], as_text: bool) -> None:
    """On standard output."""
    print("\n".join(lines(findings)) if as_text else json.dumps(as_json(findings), indent=1), flush=True)


def node_findings(config: RunConfig, env: Mapping[str, str], host: str, nodes: int, local: int) -> list[Finding]:
    """All checks of one machine. nodes: of the job; local: ranks of this one."""
    shared = nodes > 1 or config.launch.kind == "slurm"
    return [
        *software(),
        *gpus(),
        *tools(env),
        *limits(Path(config.run_dir or RUNS).absolute(), shared),
        *surroundings(env, host, nodes, config.cluster.fabric.interface, local),
    ]
