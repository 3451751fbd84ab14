"""Arguments of the commands, and what each calls. Other commands' are in data.py and *_arguments.py.

A command's module is imported by the function that runs it: a help text and a completion import nothing heavy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

_RUN = "a run directory, a sweep directory, or a job id"
_OVERRIDES = "key=value as in conf/, such as model=llama_1b optim.lr=1e-3 train.steps=1000"


def add_run(command: argparse.ArgumentParser) -> None:
    """Add RUN."""
    command.add_argument("target", metavar="RUN", help=_RUN)


def add_overrides(command: argparse.ArgumentParser, example: str = _OVERRIDES, config_dir: bool = True) -> None:
    """Add overrides of the configuration and the folder that extends conf/."""
    command.add_argument("overrides", nargs="*", metavar="override", help=example)
    if config_dir:
        command.add_argument("--config-dir", metavar="DIR", help="a folder laid out as conf/, whose options are added")


def add_json(command: argparse.ArgumentParser, text: str = "print the answer as JSON") -> None:
    """Add --json."""
    command.add_argument("--json", action="store_true", help=text)


def add_config_options(command: argparse.ArgumentParser) -> None:
    """Add what train and submit share: overrides, --cfg and -m."""
    add_overrides(command)
    command.add_argument("--cfg", action="store_true", help="print the composed configuration and stop")
    command.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a sweep: each override may have several values, as in optim.lr=1e-3,1e-4 train.seed=range(3)",
    )


def print_config(arguments: argparse.Namespace) -> int:
    """Print the configuration of one run, for --cfg."""
    from hpc_train.config.compose import compose, config_to_yaml
    from hpc_train.errors import UserError

    if arguments.multirun:
        raise UserError("--cfg: shows one run; leave out -m, or give one value of each override")
    print(config_to_yaml(compose(arguments.overrides, arguments.config_dir)), end="")
    return 0


def whole_number(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 9 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {least} or more")
        return int(text)

    return parse


def add_train(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    add_config_options(command)
    command.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from hpc_train.runtime import processes

    request = processes.install_stop_handlers()  # before anything slow is imported: a signal from now on is kept
    from hpc_train.launch.train import train_here

    if arguments.cfg:
        return print_config(arguments)
    if arguments.multirun:
        from hpc_train.launch.sweep.local_sweep import train_sweep

        return train_sweep(arguments.overrides, arguments.config_dir, request)
    return train_here(arguments.overrides, arguments.config_dir, request)


def add_submit(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `submit`."""
    add_config_options(command)
    command.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    add_json(command)
    command.add_argument(
        "--after", action="append", default=[], metavar="RUN", help="start when this run is done; repeatable"
    )
    command.set_defaults(run=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from hpc_train.launch.submit import default_to_slurm, submit_command

    a = arguments
    a.overrides = default_to_slurm(a.overrides)
    if a.cfg:
        return print_config(a)
    if a.multirun:
        from hpc_train.cli.submit_sweep import submit_sweep_command

        return submit_sweep_command(a.overrides, a.config_dir, a.dry_run, a.json, a.after)
    return submit_command(a.overrides, a.config_dir, a.dry_run, a.json, a.after)


def add_status(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    add_run(command)
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("-w", "--watch", action="store_true", help="a live table, until all has ended (or Ctrl-C)")
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    command.set_defaults(run=_status)


def _status(a: argparse.Namespace) -> int:
    from hpc_train.cli.status import status_command

    return status_command(a.target, a.json, a.watch)


def add_logs(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `logs`."""
    add_run(command)
    count = whole_number(0)
    command.add_argument("-f", "--follow", action="store_true", help="go on as it grows, over requeues, to the end")
    command.add_argument("--rank", type=count, metavar="R", help="of this rank (default: 0, which speaks for all)")
    command.add_argument("--attempt", type=count, metavar="A", help="of this attempt (default: the newest)")
    command.add_argument("--tail", type=count, metavar="N", help="only the last N lines")
    command.add_argument("--first-error", action="store_true", help="the rank that failed first, and with what")
    command.set_defaults(run=_logs)


def _logs(a: argparse.Namespace) -> int:
    from hpc_train.cli.logs import LogSelection, logs_command

    return logs_command(a.target, LogSelection(a.rank, a.attempt, a.tail), a.follow, a.first_error)


def add_cancel(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `cancel`."""
    add_run(command)
    command.add_argument("--yes", action="store_true", help="do not ask")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="end it at once, without a save")
    how.add_argument(
        "--no-wait",
        action="store_true",
        help="ask it to save and end, and return (default: wait launch.cancel_seconds, then end what has not ended)",
    )
    command.set_defaults(run=_cancel)


def _cancel(arguments: argparse.Namespace) -> int:
    from hpc_train.launch.cancel import cancel_command

    return cancel_command(arguments.target, arguments.yes, arguments.now, not arguments.no_wait)


def add_attach(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `attach`."""
    add_run(command)
    where = command.add_mutually_exclusive_group()
    where.add_argument("--rank", type=whole_number(0), metavar="R", help="on the node of this rank (default: 0)")
    where.add_argument("--node", metavar="NAME", help="on this node of the job")
    command.add_argument("--dry-run", action="store_true", help="print the command and do nothing")
    command.epilog = "After -- comes the command to run there; without one it is a login shell."
    command.set_defaults(run=_attach, words=[])


def _attach(a: argparse.Namespace) -> int:
    from hpc_train.cli.attach import attach_command

    return attach_command(a.target, a.words, a.rank, a.node, a.dry_run)


def add_resume(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `resume`."""
    add_run(command)
    command.add_argument(
        "--mode",
        default="retry",
        choices=("retry", "cached", "force", "read-only"),
        help="retry: all that has ended and is not done (default); cached: only what has never begun; force: all that "
        "has ended, from its first step; read-only: say what retry would do",
    )
    add_json(command)
    command.set_defaults(run=_resume)


def _resume(arguments: argparse.Namespace) -> int:
    from hpc_train.runtime import processes

    request = processes.install_stop_handlers()  # before anything slow is imported: a signal from now on is kept
    from hpc_train.launch.resume import resume_command

    return resume_command(arguments.target, arguments.mode, arguments.json, request)


def add_results(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `results`."""
    add_run(command)
    command.add_argument("--metric", metavar="NAME", help="of metrics.jsonl (default: validation_loss, else loss)")
    command.add_argument("--best", action="store_true", help="also its best value, for which all steps are read")
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    shown.add_argument("--csv", metavar="FILE", help="write it as CSV; -: print it")
    command.add_argument("--plot", metavar="FILE", help="draw the metric over what was swept, or over steps")
    command.set_defaults(run=_results)


def _results(a: argparse.Namespace) -> int:
    from hpc_train.cli.results import ResultsOptions, results_command

    return results_command(a.target, ResultsOptions(a.metric, a.best, a.json, a.csv, a.plot))


def add_doctor(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    add_overrides(command)
    add_json(command, "print what was found as JSON")
    command.set_defaults(run=_doctor)


def _doctor(a: argparse.Namespace) -> int:
    from hpc_train.cli.doctor import doctor_command

    return doctor_command(a.overrides, a.config_dir, not a.json)


def add_completion(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    command.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "query"),
        help="print its script; query: print the completions of a line",
    )
    command.add_argument("words", nargs="*", help="query: `--` and the words of the line after hpc-train")
    command.set_defaults(run=_completion)


def _completion(a: argparse.Namespace) -> int:
    from hpc_train.cli.completion import complete_words, completion_script
    from hpc_train.cli.main import join_plan_command, make_parser

    if a.shell != "query":
        print(completion_script(a.shell), end="")
        return 0
    line = join_plan_command(a.words[1:] if a.words[:1] == ["--"] else a.words)
    for candidate in complete_words(make_parser(line), line):
        print(candidate)
    return 0
