"""Arguments of the commands about a run or a sweep: status, logs, cancel, attach, resume, results."""

from __future__ import annotations

import argparse
import re

from hpc_train.cli.arguments import add_examples, add_json, add_run, rank_ranges, whole_number


def add_status(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    add_run(command)
    output = command.add_mutually_exclusive_group()
    output.add_argument("-w", "--watch", action="store_true", help="redraw the table until every run has ended")
    output.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--goodput", action="store_true", help="show what node-hours were spent on instead of the table"
    )
    add_examples(
        command,
        "hpc-train status runs/first",
        "hpc-train status sweeps/lr --watch",
        "hpc-train status 4711 --json",
        "hpc-train status runs/first --goodput",
    )
    command.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    from hpc_train.cli.run.status import status_command
    from hpc_train.errors import UserError

    if args.goodput and args.watch:
        raise UserError("status: --goodput is not redrawn; leave out --watch")
    return status_command(args.target, args.json, args.watch, args.goodput)


def add_logs(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `logs`."""
    add_run(command)
    count = whole_number(0)
    command.add_argument(
        "-f", "--follow", action="store_true", help="keep printing until the run ends, across requeues"
    )
    command.add_argument(
        "--rank",
        type=rank_ranges,
        metavar="R",
        help="log of this rank (default: 0, which prints the progress); with --merge also several, as 0,8-15",
    )
    command.add_argument("--attempt", type=count, metavar="A", help="log of this attempt (default: the newest)")
    command.add_argument("--tail", type=count, metavar="N", help="print only the last N lines")
    command.add_argument("--first-error", action="store_true", help="show which rank failed first, and its error")
    merged = command.add_argument_group("logs of all ranks")
    merged.add_argument(
        "--merge",
        action="store_true",
        help="print the first error, then the lines of all ranks in the order of their times, equal ones once",
    )
    merged.add_argument(
        "--level", choices=("debug", "info", "warning", "error"), help="with --merge: lines of this level and worse"
    )
    merged.add_argument(
        "--step", type=_step_range, metavar="S[:T]", help="with --merge: lines of this step, or of steps S to T"
    )
    merged.add_argument("--json", action="store_true", help="with --merge: print JSON Lines")
    add_examples(
        command,
        "hpc-train logs runs/first -f",
        "hpc-train logs runs/first --rank 3 --tail 50",
        "hpc-train logs sweeps/lr --first-error",
        "hpc-train logs runs/first --merge --rank 0,8-15 --level warning --step 100:120",
    )
    command.set_defaults(run=_logs)


def _logs(args: argparse.Namespace) -> int:
    from hpc_train.cli.run.logs import LogSelection, logs_command
    from hpc_train.errors import UserError

    choice = LogSelection(args.rank, args.attempt, args.tail)
    if args.merge:
        if args.follow or args.first_error:
            option = "-f" if args.follow else "--first-error"
            raise UserError(f"logs --merge: prints what there is, the first error first; leave out {option}")
        from hpc_train.cli.run.merged_logs import merged_logs_command
        from hpc_train.launch.state.merged_lines import LineFilter

        return merged_logs_command(
            args.target, choice, LineFilter(args.rank, args.level or "debug", args.step), args.json
        )
    if unused := [name for name in ("level", "step", "json") if getattr(args, name)]:
        raise UserError(f"logs --{unused[0]}: is for the logs of all ranks; add --merge")
    if args.rank is not None and (len(args.rank) > 1 or len(args.rank[0]) > 1):
        raise UserError("logs --rank: one log at a time; add --merge for the lines of several ranks")
    return logs_command(args.target, choice, args.follow, args.first_error)


_STEPS = re.compile(r"(\d{1,9})(?::(\d{1,9}))?", re.ASCII)


def _step_range(text: str) -> tuple[int, int]:
    """Parse a step, or the first and the last of several, such as 100:120."""
    match = _STEPS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step, nor a range of steps such as 100:120")
    return int(match[1]), int(match[2] or match[1])


def add_cancel(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `cancel`."""
    add_run(command)
    command.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    ending = command.add_mutually_exclusive_group()
    ending.add_argument("--now", action="store_true", help="kill it at once, without saving")
    ending.add_argument(
        "--no-wait",
        action="store_true",
        help="ask it to save and stop, then return (default: wait launch.cancel_seconds, then kill what still runs)",
    )
    add_examples(command, "hpc-train cancel runs/first", "hpc-train cancel sweeps/lr --yes --no-wait")
    command.set_defaults(run=_cancel)


def _cancel(args: argparse.Namespace) -> int:
    from hpc_train.cli.run.cancel import cancel_command

    return cancel_command(args.target, args.yes, args.now, not args.no_wait)


def add_attach(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `attach`."""
    add_run(command)
    target = command.add_mutually_exclusive_group()
    target.add_argument("--rank", type=whole_number(0), metavar="R", help="go to the node of this rank (default: 0)")
    target.add_argument("--node", metavar="NAME", help="go to this node of the job")
    command.add_argument("--dry-run", action="store_true", help="print the srun command; do not run it")
    command.epilog = "Give the command to run after --. Without one, a login shell is opened."
    add_examples(
        command,
        "hpc-train attach runs/first",
        "hpc-train attach runs/first --rank 8 -- nvidia-smi",
        "hpc-train attach 4711 --node node002 --dry-run",
    )
    command.set_defaults(run=_attach, words=[])


def _attach(args: argparse.Namespace) -> int:
    from hpc_train.cli.run.attach import attach_command

    return attach_command(args.target, args.words, args.rank, args.node, args.dry_run)


def add_resume(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `resume`."""
    add_run(command)
    command.add_argument(
        "--mode",
        default="retry",
        choices=("retry", "cached", "force", "read-only"),
        help="retry: everything that ended without being done (default); cached: only what never started; "
        "force: everything that ended, from step 0; read-only: print what retry would do",
    )
    add_json(command)
    add_examples(command, "hpc-train resume runs/first", "hpc-train resume sweeps/lr --mode read-only")
    command.set_defaults(run=_resume)


def _resume(args: argparse.Namespace) -> int:
    from hpc_train.runtime import stop_request

    # Before the slow imports, so that a SIGTERM that arrives during them is not lost.
    request = stop_request.install_stop_handlers()
    from hpc_train.cli.run.resume import resume_command

    return resume_command(args.target, args.mode, args.json, request)


def add_results(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `results`."""
    add_run(command)
    command.add_argument(
        "--metric", metavar="NAME", help="metric of metrics.jsonl to compare (default: validation_loss, else loss)"
    )
    command.add_argument("--best", action="store_true", help="also show its best value over all steps (slower)")
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--csv", metavar="FILE", help="write CSV; - prints it")
    command.add_argument(
        "--plot", metavar="FILE", help="plot the metric over the swept values, or over steps for one run"
    )
    add_examples(
        command,
        "hpc-train results sweeps/lr",
        "hpc-train results sweeps/lr --metric loss --best --csv results.csv",
        "hpc-train results sweeps/lr --plot lr.png",
    )
    command.set_defaults(run=_results)


def _results(args: argparse.Namespace) -> int:
    from hpc_train.cli.run.results import ResultsOptions, results_command

    return results_command(args.target, ResultsOptions(args.metric, args.best, args.json, args.csv, args.plot))
