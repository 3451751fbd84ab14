"""`hpc-train report RUN`: say how a run is doing, why it is slow and what to try, and write the page that shows it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.arguments import add_examples, add_json, add_run
from hpc_train.errors import EXIT_DONE

if TYPE_CHECKING:
    from hpc_train.launch.state.run_lookup import RunPoint
    from hpc_train.report.advice import Setting
    from hpc_train.report.run_summary import RunSummary


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    add_run(command)
    command.add_argument(
        "other", nargs="?", metavar="RUN", help="a second run to compare: which part of a step has changed"
    )
    command.add_argument("--out", metavar="DIR", help="folder for the page and its data (default: the last run's)")
    command.add_argument(
        "--try",
        action="store_true",
        dest="experiments",
        help="print commands for the next experiments instead of writing a page",
    )
    add_json(command, "print the content of report.json; write files only if --out is given")
    add_examples(
        command,
        "hpc-train report runs/first",
        "hpc-train report runs/first runs/second",
        "hpc-train report sweeps/lr --out /tmp/lr",
        "hpc-train report 1234 --json",
    )
    command.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.launch.state.run_lookup import find_points, require_single

    out = Path(args.out) if args.out else None
    points = find_points(args.target, run_client)
    if args.other is not None:
        second = require_single(find_points(args.other, run_client), args.other)
        return report_comparison(require_single(points, args.target), second, out, args.json)
    if len(points) > 1:
        return report_sweep(Path(args.target), points, out, args.json)
    if args.experiments:
        return print_experiments(points[0])
    return report_run(points[0], out, args.json)


def report_run(point: RunPoint, out: Path | None, as_json: bool) -> int:
    """Report one run; returns the exit code. Raises UserError for a folder that cannot be written."""
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.report.pages.page import make_report, write_report
    from hpc_train.report.run_summary import summarise_run

    summary = summarise_run(point, run_client)
    page = write_report(summary, out or summary.path) if out is not None or not as_json else None
    if as_json:
        print(json.dumps(make_report(summary)))
    else:
        print_verdict(summary)
        print(f"page        {page}")
    return EXIT_DONE


def print_experiments(point: RunPoint) -> int:
    """Print a command for each setting that the verdict advises; returns the exit code.

    Raises UserError if the run's configuration cannot be read, or if there is nothing to try.
    """
    from hpc_train.config.keys.overrides import format_override_value
    from hpc_train.config.keys.run_overrides import list_overrides
    from hpc_train.errors import UserError
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.report.run_summary import read_config, summarise_run
    from hpc_train.report.tuning.search import format_command

    summary = summarise_run(point, run_client)
    if summary.config is None:
        loop = f"{point.run}: a training loop of your own, whose settings are not recorded, so there are none to try"
        raise UserError(read_config(point.run)[1] or loop)
    overrides = list_overrides(summary.config)
    print(f"# {summary.verdict.line}")
    commands = 0
    for setting in summary.verdict.advice:
        print(f"# {setting.why}")
        if setting.override:
            commands += 1
            changed = dict(word.split("=", 1) for word in setting.override.split())
            run_dir = format_override_value(f"{point.run}-try{commands}")
            print(format_command(overrides, {**changed, "run_dir": run_dir}, summary.config.launch.kind == "slurm"))
    return EXIT_DONE


def report_comparison(first: RunPoint, second: RunPoint, out: Path | None, as_json: bool) -> int:
    """Compare two runs; returns the exit code. Raises UserError for a folder that cannot be written."""
    from hpc_train.cli.output import print_line, print_table
    from hpc_train.config.keys.overrides import format_override_value
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.report.comparison import compare_runs, write_comparison
    from hpc_train.report.run_summary import summarise_run
    from hpc_train.units import format_seconds

    comparison = compare_runs(summarise_run(first, run_client), summarise_run(second, run_client))
    page = write_comparison(comparison, out or second.run) if out is not None or not as_json else None
    if as_json:
        print(json.dumps(comparison.as_json()))
        return EXIT_DONE
    print_line(comparison.line)
    rows = [
        (
            part.name.replace("_", " "),
            format_seconds(part.before),
            format_seconds(part.after),
            f"{part.moved * 1000:+.1f} ms",
        )
        for part in comparison.parts
    ]
    print_table(("part", first.name, second.name, "moved"), rows, (first.name, second.name, "moved"))
    for key, before, after in comparison.settings:
        print_line(f"{key}: {format_override_value(before)} -> {format_override_value(after)}")
    print_line(f"page  {page}")
    return EXIT_DONE


def report_sweep(path: Path, points: Sequence[RunPoint], out: Path | None, as_json: bool) -> int:
    """Report all points of a sweep; returns the exit code. Raises UserError for a folder that cannot be written."""
    from hpc_train.cli.output import print_line
    from hpc_train.launch.state.run_ledger import account_run_directory
    from hpc_train.report.pages.sweep_page import list_sweep_rows, write_sweep
    from hpc_train.report.run_summary import judge_newest_steps
    from hpc_train.report.sweep_results import gather_results, select_varied_keys

    results = gather_results(points)
    ledgers = [account_run_directory(point.run) for point in points]
    hours = [(ledger.total - ledger.seconds["queue"]) / 3600 for ledger in ledgers]
    verdicts = [judge_newest_steps(point.run)[0].name for point in points]
    rows = list_sweep_rows(points, results, hours, verdicts)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    if out is not None or not as_json:
        page = write_sweep(
            path.absolute(), rows, select_varied_keys(results.rows, results.keys), results.metric, out or path
        )
        if not as_json:
            best = rows[0] if rows and rows[0].best else None
            print_line(
                f"{len(rows)} points" + (f"; best: {best.point}, {results.metric} {best.metric:.5g}" if best else "")
            )
            if best is not None and best.command:
                print_line(f"again  {best.command}")
            print_line(f"page   {page}")
    return EXIT_DONE


def print_verdict(summary: RunSummary) -> None:
    """Print state, verdict, evidence, advice, efficiency and goodput, a line each."""
    from hpc_train.cli.output import print_fields
    from hpc_train.report.usage import compute_cost, describe_cost

    verdict, losses, status = summary.verdict, summary.losses, summary.status
    progress = (
        f", step {status.step}" + (f" of {status.steps}" if status.steps else "") if status.step is not None else ""
    )
    facts: list[tuple[str, object]] = [("state", f"{status.state}{progress}")]
    if status.reason:
        facts.append(("reason", status.reason))
    facts.append(("verdict", verdict.line))
    facts += [("because", line) for line in verdict.evidence]
    facts += [("try", _describe_setting(setting)) for setting in verdict.advice]
    facts += [
        ("then", f"{finding.name}, {finding.share:.0%} of the step: {finding.evidence}") for finding in verdict.further
    ]
    if losses is not None:
        factors = " x ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in losses.efficiencies.items())
        facts.append(("efficiency", f"{losses.useful / losses.total:.0%} = {factors}"))
    if summary.ledger.total:
        facts.append(("goodput", f"{summary.ledger.goodput:.1%} of the node-hours on nodes"))
    if cost := describe_cost(compute_cost(summary), summary.facts.accelerator):
        facts.append(("cost", cost))
    facts += [("not read", note) for note in summary.notes]
    print_fields(facts)


def _describe_setting(setting: Setting) -> str:
    if not setting.override:
        return setting.why
    gain = setting.planned_gain
    planned = "" if gain is None else f"; the planner expects {gain:+.0%} tokens a second"
    return f"{setting.words}  ({setting.why}{planned})"
