"""The command `hpc-train`: find the command, import its module, call its function, and turn errors into one line.

A command's module is imported only when that command runs, so that `hpc-train --help` takes 0.05 s. Its arguments
are added by a light function, here named in COMMANDS, which sets `run`: a function of the parsed arguments that returns
the exit code.
"""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NoReturn

from hpc_train import __version__
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.terminal import escaping_stdout, one_line

EXIT_INTERRUPTED = 130
COMMANDS = {
    "train": ("arguments:add_train", "train here; inside srun, torchrun or mpirun, join as a rank"),
    "submit": ("arguments:add_submit", "submit the run to Slurm and return at once"),
    "status": ("arguments:add_status", "progress of a run, or of every point of a sweep"),
    "logs": ("arguments:add_logs", "what the ranks of a run print"),
    "cancel": ("arguments:add_cancel", "let a run save, and end it; nothing of it is requeued"),
    "attach": ("arguments:add_attach", "a shell, or a command after --, inside of a running job"),
    "resume": ("arguments:add_resume", "run again what a sweep or a run lacks, as it was frozen"),
    "results": ("arguments:add_results", "overrides and final metrics of every point, as a table, a file or a plot"),
    "plan": (
        "plan.plan_arguments:add_plan",
        "memory, step time, MFU and cost of a run before it starts, and the best ways to spread it",
    ),
    "plan validate": (
        "plan.plan_arguments:add_validate",
        "the planner's predictions against measured runs of a table",
    ),
    "plan rehearse": (
        "plan.plan_arguments:add_rehearse",
        "build the model with its real passes for a large world, on one CPU and without its memory",
    ),
    "plan calibrate": (
        "plan.plan_arguments:add_calibrate",
        "what benchmarks and short runs tell of a cluster, as one file for cluster.calibration",
    ),
    "plan fit": (
        "plan.plan_arguments:add_fit",
        "fit the planner's constants to measured runs, with cross-validation",
    ),
    "data": ("data", "build and inspect token stores"),
    "checkpoint": ("checkpoint.checkpoint_arguments", "list, inspect, verify, convert and remove checkpoints"),
    "topology": ("topology.topology_arguments", "what a machine is made of, and where ranks go on it"),
    "bench": ("bench_arguments", "measure this machine"),
    "doctor": ("arguments:add_doctor", "what works here or in this job, what does not, and what to do"),
    "completion": ("arguments:add_completion", 'tab completion: eval "$(hpc-train completion bash)"'),
}
"""Command -> (where its arguments are added: module of this package, `:` and function if not add_arguments; its help).

`plan` takes any words, so argparse cannot tell its sub-commands from overrides: each is a command of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A UserError becomes one line on stderr and exit code 2."""
    arguments = _parse(argv)
    try:
        # A command's own drawing may move the cursor; a job's output that it shows must not.
        with nullcontext() if _draws(arguments) else escaping_stdout():
            code: int = arguments.run(arguments)
        return code
    except UserError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"hpc-train: {one_line(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `hpc-train ... | head`
        sys.stderr.close()
        return 141
    except OSError as error:
        from hpc_train.regular_files import NotRegularError

        if error.errno != errno.ENAMETOOLONG and not isinstance(error, NotRegularError):
            raise
        if arguments.debug:
            traceback.print_exc()
        name = str(error.filename)
        name = name[:60] + "..." if error.errno == errno.ENAMETOOLONG else name
        print(f"hpc-train: {one_line(f'{name}: {error.strerror}')}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """A parser, and by add_subparsers its sub-commands, whose errors are one line and which all take --debug."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # Without a default, so that a sub-command does not undo what was given before it.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"hpc-train: {one_line(message)}; see `{self.prog} --help`\n")


def _draws(arguments: argparse.Namespace) -> bool:
    return arguments.command in ("train", "attach", "bench") or getattr(arguments, "watch", False)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options; argparse takes the first row of them only."""
    words, command_there = _split(join_plan_command(sys.argv[1:] if argv is None else argv))
    parser = make_parser(words)
    arguments, rest = parser.parse_known_args(words)
    if command_there:
        arguments.words = command_there
    unknown = [word for word in rest if word.startswith("-")] if hasattr(arguments, "overrides") else rest
    if unknown:
        command = f"`hpc-train {arguments.command} --help`"
        parser.exit(EXIT_USER_ERROR, f"hpc-train: unknown option {one_line(' '.join(unknown))}; see {command}\n")
    if rest:
        arguments.overrides += rest
    return arguments


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before `--` and, of attach, those after it: options between RUN and `--` confuse argparse."""
    if "--" not in words or "attach" not in words[: words.index("--")]:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def join_plan_command(words: Sequence[str]) -> list[str]:
    """Return `plan validate ...` as `"plan validate" ...`, wherever options stand before it."""
    found = list(words)
    index = next((at for at, word in enumerate(found) if not word.startswith("-")), len(found))
    if found[index : index + 1] == ["plan"] and (joined := " ".join(found[index : index + 2])) in COMMANDS:
        found[index : index + 2] = [joined]
    return found


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    words: a command line; only the command that it names gets its arguments, and only its module is imported.
    """
    named = None if words is None else next((word for word in words if not word.startswith("-")), "")
    parser: argparse.ArgumentParser = _Parser(
        prog="hpc-train", description="Describe, submit, train, checkpoint and resume PyTorch runs on Slurm clusters."
    )
    parser.set_defaults(debug=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if named in (None, name):
            place, _, function = module.partition(":")
            getattr(import_module(f"{__package__}.{place}"), function or "add_arguments")(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
