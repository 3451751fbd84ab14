"""What the commands on runs that were started take. A help text imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

_RUN = "a run directory, a sweep directory, or a job id"
_Commands = Any


def add_arguments(commands: _Commands) -> None:
    """Add status, logs, cancel, attach, resume and results; each sets `run`, a function of the parsed arguments."""
    _add_status(commands)
    _add_logs(commands)
    _add_cancel(commands)
    _add_attach(commands)
    _add_resume(commands)
    _add_results(commands)


def _command(commands: _Commands, name: str, summary: str) -> Any:
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("target", metavar="RUN", help=_RUN)
    return command


def _count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def _add_status(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.launch.status import status_command

        return status_command(arguments.target, arguments.json, arguments.watch)

    command = _command(commands, "status", "where a run, or every point of a sweep, has got to")
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("-w", "--watch", action="store_true", help="a live table, until all has ended (or Ctrl-C)")
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    command.set_defaults(run=run)


def _add_logs(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.launch.logs import Choice, logs_command

        a = arguments
        return logs_command(a.target, Choice(a.rank, a.attempt, a.tail), a.follow, a.first_error)

    command = _command(commands, "logs", "what the ranks of a run print")
    command.add_argument("-f", "--follow", action="store_true", help="go on as it grows, over requeues, to the end")
    command.add_argument("--rank", type=_count, metavar="R", help="of this rank (default: 0, which speaks for all)")
    command.add_argument("--attempt", type=_count, metavar="A", help="of this attempt (default: the newest)")
    command.add_argument("--tail", type=_count, metavar="N", help="only the last N lines")
    command.add_argument("--first-error", action="store_true", help="the rank that failed first, and with what")
    command.set_defaults(run=run)


def _add_cancel(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.launch.cancel import cancel_command

        return cancel_command(arguments.target, arguments.yes, arguments.now, not arguments.no_wait)

    command = _command(commands, "cancel", "let a run save, and end it; nothing of it is requeued")
    command.add_argument("--yes", action="store_true", help="do not ask")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="end it at once, without a save")
    how.add_argument(
        "--no-wait",
        action="store_true",
        help="ask it to save and end, and return (default: wait launch.cancel_seconds, then end what has not ended)",
    )
    command.set_defaults(run=run)


def _add_attach(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.launch.attach import attach_command

        a = arguments
        return attach_command(a.target, a.words, a.rank, a.node, a.dry_run)

    command = _command(commands, "attach", "a shell, or a command after --, inside of a running job")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--rank", type=_count, metavar="R", help="on the node of this rank (default: 0)")
    where.add_argument("--node", metavar="NAME", help="on this node of the job")
    command.add_argument("--dry-run", action="store_true", help="print the command and do nothing")
    command.epilog = "After -- comes the command to run there; without one it is a login shell."
    command.set_defaults(run=run, words=[])


def _add_resume(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.runtime import stop

        request = stop.install()  # before anything slow is imported: a signal from now on is kept
        from hpc_train.launch.sweep.resume import resume_command

        return resume_command(arguments.target, arguments.mode, arguments.json, request)

    command = _command(commands, "resume", "run again what a sweep or a run lacks, as it was frozen")
    command.add_argument(
        "--mode",
        default="retry",
        choices=("retry", "cached", "force", "read-only"),
        help="retry: all that has ended and is not done (default); cached: only what has never begun; force: all that "
        "has ended, from its first step; read-only: say what retry would do",
    )
    command.add_argument("--json", action="store_true", help="print the answer as JSON")
    command.set_defaults(run=run)


def _add_results(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.launch.sweep.results import Wanted, results_command

        a = arguments
        return results_command(a.target, Wanted(a.metric, a.best, a.json, a.csv, a.plot))

    command = _command(commands, "results", "overrides and final metrics of every point, as a table, a file or a plot")
    command.add_argument("--metric", metavar="NAME", help="of metrics.jsonl (default: validation_loss, else loss)")
    command.add_argument("--best", action="store_true", help="also its best value, for which all steps are read")
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    shown.add_argument("--csv", metavar="FILE", help="write it as CSV; -: print it")
    command.add_argument("--plot", metavar="FILE", help="draw the metric over what was swept, or over steps")
    command.set_defaults(run=run)
