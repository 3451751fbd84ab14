"""Define the arguments of the commands that have no sub-commands, and the options that several commands share.

Nothing heavy is imported here, so that a help text and a tab completion are quick: the function that runs a command
imports the command's module.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeAlias

CommandGroup: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Type of what ArgumentParser.add_subparsers returns."""
_OVERRIDES = "a setting as key=value, such as model=llama_1b or optim.lr=1e-3; `hpc-train explain KEY` describes one"


def add_examples(command: argparse.ArgumentParser, *lines: str) -> None:
    """Show example command lines at the end of the help text."""
    # The default formatter would join the lines into one paragraph.
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    examples = "\n".join(["examples:", *(f"  {line}" for line in lines)])
    command.epilog = f"{command.epilog}\n\n{examples}" if command.epilog else examples


def add_command(commands: CommandGroup, name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command whose help and description are its one-line summary, and return its parser."""
    return commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the positional argument RUN."""
    command.add_argument("target", metavar="RUN", help="run directory, sweep directory or job id")


def add_overrides(command: argparse.ArgumentParser, example: str = _OVERRIDES, config_dir: bool = True) -> None:
    """Add the overrides of the configuration, and --config-dir for the user's own option files."""
    command.add_argument("overrides", nargs="*", metavar="override", help=example)
    if config_dir:
        command.add_argument(
            "--config-dir", metavar="DIR", help="also take options from this folder, laid out as conf/"
        )


def add_json(command: argparse.ArgumentParser, text: str = "print JSON") -> None:
    """Add --json."""
    command.add_argument("--json", action="store_true", help=text)


def add_weights(command: argparse.ArgumentParser) -> None:
    """Add --weights."""
    command.add_argument(
        "--weights",
        choices=("average", "trained"),
        help="of a run with optim.ema.decay (default: those of the run's own evaluations)",
    )


def add_config_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments that train and submit share: overrides, --cfg and -m."""
    add_overrides(command)
    command.add_argument("--cfg", action="store_true", help="print the composed configuration and exit")
    command.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="run a sweep: an override may list values, as in optim.lr=1e-3,1e-4 or train.seed=range(3)",
    )


def print_config(arguments: argparse.Namespace) -> int:
    """Print the composed configuration of one run (--cfg)."""
    from hpc_train.config.compose import compose
    from hpc_train.config.plain_config import config_to_yaml
    from hpc_train.errors import UserError

    if arguments.multirun:
        raise UserError("--cfg: shows one run; leave out -m, or give one value of each override")
    print(config_to_yaml(compose(arguments.overrides, arguments.config_dir)), end="")
    return 0


def whole_number(minimum: int) -> Callable[[str], int]:
    """Return an argument type that accepts whole numbers of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 9 or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {minimum} or more")
        return int(text)

    return parse


def add_train(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    add_config_options(command)
    add_examples(
        command,
        "hpc-train train",
        "hpc-train train model=gpt2_tiny train.steps=50 run_dir=runs/first",
        "hpc-train train -m optim.lr=1e-3,3e-4 train.seed='range(3)' run_dir=sweeps/lr",
        "hpc-train train parallel=fsdp launch.ranks=4 --cfg",
    )
    command.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from hpc_train.runtime import processes

    # Before the slow imports, so that a SIGTERM that arrives during them is not lost.
    request = processes.install_stop_handlers()
    from hpc_train.cli.output import TERMINAL
    from hpc_train.launch.train import train_here

    if arguments.cfg:
        return print_config(arguments)
    if arguments.multirun:
        from hpc_train.launch.sweep.local_sweep import train_sweep

        return train_sweep(arguments.overrides, arguments.config_dir, request, TERMINAL)
    return train_here(arguments.overrides, arguments.config_dir, request, TERMINAL)


def add_submit(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `submit`."""
    add_config_options(command)
    command.add_argument("--dry-run", action="store_true", help="print the batch script; submit nothing")
    add_json(command)
    command.add_argument(
        "--after", action="append", default=[], metavar="RUN", help="start only when this run is done; repeatable"
    )
    add_examples(
        command,
        "hpc-train submit cluster=perlmutter cluster.nodes=4 launch.account=m1234 model=llama_1b parallel=fsdp",
        "hpc-train submit cluster.nodes=2 launch.partition=debug launch.time_minutes=30 --dry-run",
        "hpc-train submit -m optim.lr=1e-3,3e-4 run_dir=sweeps/lr",
        "hpc-train submit --after runs/first run_dir=runs/second",
    )
    command.set_defaults(run=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from hpc_train.cli.submit import submit_command, submit_sweep_command
    from hpc_train.launch.submit import default_to_slurm

    a = arguments
    a.overrides = default_to_slurm(a.overrides)
    if a.cfg:
        return print_config(a)
    submit = submit_sweep_command if a.multirun else submit_command
    return submit(a.overrides, a.config_dir, a.dry_run, a.json, a.after)


def add_status(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    add_run(command)
    output = command.add_mutually_exclusive_group()
    output.add_argument("-w", "--watch", action="store_true", help="redraw the table until every run has ended")
    output.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--goodput", action="store_true", help="show what node-hours were spent on, not the table")
    add_examples(
        command,
        "hpc-train status runs/first",
        "hpc-train status sweeps/lr --watch",
        "hpc-train status 4711 --json",
        "hpc-train status runs/first --goodput",
    )
    command.set_defaults(run=_status)


def _status(a: argparse.Namespace) -> int:
    from hpc_train.cli.run.status import status_command
    from hpc_train.errors import UserError

    if a.goodput and a.watch:
        raise UserError("status: --goodput is not redrawn; leave out --watch")
    return status_command(a.target, a.json, a.watch, a.goodput)


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


def _logs(a: argparse.Namespace) -> int:
    from hpc_train.cli.run.logs import LogSelection, logs_command
    from hpc_train.errors import UserError

    choice = LogSelection(a.rank, a.attempt, a.tail)
    if a.merge:
        if a.follow or a.first_error:
            option = "-f" if a.follow else "--first-error"
            raise UserError(f"logs --merge: prints what there is, the first error first; leave out {option}")
        from hpc_train.cli.run.merged_logs import merged_logs_command
        from hpc_train.launch.state.merged_lines import LineFilter

        return merged_logs_command(a.target, choice, LineFilter(a.rank, a.level or "debug", a.step), a.json)
    if unused := [name for name in ("level", "step", "json") if getattr(a, name)]:
        raise UserError(f"logs --{unused[0]}: is for the logs of all ranks; add --merge")
    if a.rank is not None and (len(a.rank) > 1 or len(a.rank[0]) > 1):
        raise UserError("logs --rank: one log at a time; add --merge for the lines of several ranks")
    return logs_command(a.target, choice, a.follow, a.first_error)


_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_STEPS = re.compile(r"(\d{1,9})(?::(\d{1,9}))?", re.ASCII)


def rank_ranges(text: str) -> tuple[range, ...]:
    """Parse ranks such as 3 or 0,8-15."""
    ranges = []
    for part in text.split(","):
        match = _RANKS.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 3 or 0,8-15")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(ranges)


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


def _cancel(arguments: argparse.Namespace) -> int:
    from hpc_train.cli.run.cancel import cancel_command

    return cancel_command(arguments.target, arguments.yes, arguments.now, not arguments.no_wait)


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


def _attach(a: argparse.Namespace) -> int:
    from hpc_train.cli.run.attach import attach_command

    return attach_command(a.target, a.words, a.rank, a.node, a.dry_run)


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


def _resume(arguments: argparse.Namespace) -> int:
    from hpc_train.runtime import processes

    # Before the slow imports, so that a SIGTERM that arrives during them is not lost.
    request = processes.install_stop_handlers()
    from hpc_train.cli.run.resume import resume_command

    return resume_command(arguments.target, arguments.mode, arguments.json, request)


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


def _results(a: argparse.Namespace) -> int:
    from hpc_train.cli.run.results import ResultsOptions, results_command

    return results_command(a.target, ResultsOptions(a.metric, a.best, a.json, a.csv, a.plot))


def add_doctor(command: argparse.ArgumentParser) -> None:
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


def _doctor(a: argparse.Namespace) -> int:
    from hpc_train.cli.doctor import doctor_command

    return doctor_command(a.overrides, a.config_dir, not a.json)


def add_completion(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    command.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "query"),
        help="shell whose script to print; query: print the completions of a command line",
    )
    command.add_argument("words", nargs="*", help="query only: -- and the words after hpc-train")
    add_examples(command, 'eval "$(hpc-train completion bash)"', "hpc-train completion query -- train model=llama_")
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
