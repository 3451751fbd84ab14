"""`hpc-train report RUN`: say how a run is, why it is slow and what to try, and write the page that shows it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.arguments import add_examples, add_json

if TYPE_CHECKING:
    from hpc_train.report.run_summary import RunSummary


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    command.add_argument("target", metavar="RUN", help="run directory or job id")
    command.add_argument("--out", metavar="DIR", help="folder for report.html and report.json (default: the run's)")
    add_json(command, "print what report.json holds; write no files, unless --out is given")
    add_examples(
        command,
        "hpc-train report runs/first",
        "hpc-train report runs/first --out /tmp/first",
        "hpc-train report 1234 --json",
    )
    command.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    return report_command(arguments.target, Path(arguments.out) if arguments.out else None, arguments.json)


def report_command(target: str, out: Path | None, as_json: bool) -> int:
    """Report one run; returns the exit code. Raises UserError for what is no run, or a folder that is not writable."""
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.launch.state.run_lookup import find_points, require_single
    from hpc_train.report.page import make_report, write_report
    from hpc_train.report.run_summary import summarise_run

    summary = summarise_run(require_single(find_points(target, run_client), target), run_client)
    page = None
    if out is not None or not as_json:
        page, _ = write_report(summary, out or summary.path)
    if as_json:
        print(json.dumps(make_report(summary)))
        return 0
    print_verdict(summary)
    print(f"page        {page}")
    return 0


def print_verdict(summary: RunSummary) -> None:
    """Print state, verdict, evidence, advice, efficiency and goodput, a line each."""
    from hpc_train.cli.output import print_fields

    verdict, losses, status = summary.verdict, summary.losses, summary.status
    at = f", step {status.step}" + (f" of {status.steps}" if status.steps else "") if status.step is not None else ""
    facts: list[tuple[str, object]] = [("state", f"{status.state}{at}"), ("verdict", verdict.line)]
    facts += [("because", line) for line in verdict.evidence]
    for setting in verdict.advice:
        facts.append(("try", f"{setting.override}  ({setting.why})" if setting.override else setting.why))
    facts += [
        ("then", f"{finding.name}, {finding.share:.0%} of the step: {finding.evidence}") for finding in verdict.further
    ]
    if losses is not None:
        factors = " x ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in losses.efficiencies.items())
        facts.append(("efficiency", f"{losses.useful / losses.total:.0%} = {factors}"))
    facts.append(("goodput", f"{summary.ledger.goodput:.1%} of the node-hours on nodes"))
    facts += [("not read", note) for note in summary.notes]
    print_fields(facts)
