"""`hpc-train doctor`: check this machine, or as a rank the whole job, and say what to fix."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_train.cli.arguments import add_examples, add_json, add_overrides

if TYPE_CHECKING:
    from hpc_train.doctor.findings import Finding


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    add_overrides(command)
    add_json(command)
    add_examples(
        command,
        "hpc-train doctor",
        "hpc-train doctor cluster=perlmutter --json",
        "srun -N2 hpc-train doctor cluster=slurm",
    )
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    return doctor_command(args.overrides, args.config_dir, not args.json)


def doctor_command(overrides: Sequence[str], config_dir: str | None, as_text: bool) -> int:
    """Run all checks and print them; return 0 if nothing is broken, else 1. In a job, rank 0 prints for all.

    Raises UserError for a configuration that cannot be composed, or an environment that makes no sense.
    """
    from hpc_train.config.compose import compose
    from hpc_train.doctor.findings import choose_exit_code
    from hpc_train.garbage_collection import pause_gc
    from hpc_train.runtime.identity import identify_process

    config = compose(overrides, config_dir)
    identity = identify_process(os.environ)
    with pause_gc(freeze=True):  # it imports torch
        from hpc_train.doctor.machine import check_machine
    if identity is None or identity.processes == 1:
        findings = check_machine(config, os.environ, socket.gethostname(), nodes=1, local=1)
        print_findings(findings, as_text)
        return choose_exit_code(findings)
    from hpc_train.doctor.job import check_job  # needs torch.distributed

    job_findings, code = check_job(config, identity, os.environ)
    if job_findings is not None:
        print_findings(job_findings, as_text)
    return code


def print_findings(findings: Sequence[Finding], as_text: bool) -> None:
    """Print the findings as text or JSON."""
    from hpc_train.doctor.findings import findings_to_json, format_findings

    text = "\n".join(format_findings(findings)) if as_text else json.dumps(findings_to_json(findings), indent=1)
    print(text, flush=True)
