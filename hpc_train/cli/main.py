"""Run the command `hpc-train`: parse the command line, call one command, and turn errors into one line.

COMMANDS names the function that adds each command's arguments. That function sets `run`, which takes the parsed
arguments and returns the exit code, and imports the command's module only then: `hpc-train --help` takes 0.05 s.
"""

from __future__ import annotations

import argparse
import errno
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from hpc_train import __version__
from hpc_train.cli.arguments import add_command, add_examples, find_innermost_parser, list_options
from hpc_train.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError
from hpc_train.near_names import TYPO, did_you_mean, find_near_names
from hpc_train.terminal import escaping_stdout, one_line, open_missing_streams

EXIT_INTERRUPTED = 130
"""128 + SIGINT."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
"""Errors of a full, failing or read-only file system, for which one line says more than a traceback."""
_NO_HOME = "Could not determine home directory."
"""Path.expanduser raises a RuntimeError with this text for ~NAME if there is no such user."""
COMMANDS = {
    "new": ("new", "write a small project with a model, data, settings and a test"),
    "train": ("train_arguments:add_train", "train on this machine, or as a rank inside srun, torchrun or mpirun"),
    "submit": ("train_arguments:add_submit", "submit a run or a sweep to Slurm and return at once"),
    "status": ("run.run_arguments:add_status", "show the progress of a run, or of every point of a sweep"),
    "logs": ("run.run_arguments:add_logs", "print or follow the log of a rank, or find the first error"),
    "cancel": ("run.run_arguments:add_cancel", "let a run save, then stop it for good"),
    "attach": ("run.run_arguments:add_attach", "open a shell or run a command on a node of a running job"),
    "resume": ("run.run_arguments:add_resume", "rerun what a run or sweep has not finished, as it was submitted"),
    "results": ("run.run_arguments:add_results", "show overrides and final metrics of a sweep as a table, CSV or plot"),
    "report": ("run.report", "diagnose a run: its state, why it is slow and what to try; also written as a web page"),
    "top": ("run.top", "watch a run: verdict, efficiency and a heat map of its ranks, in a terminal"),
    "profile": ("run.profile", "trace some steps operator by operator, of a new run or of one that is running"),
    "tune": ("tune", "find faster settings by short runs, one change at a time"),
    "plan": ("plan.plan_arguments:add_plan", "predict memory, step time and cost, and find the best layouts"),
    "plan validate": ("plan.plan_arguments:add_validate", "compare the planner's predictions with measured runs"),
    "plan rehearse": ("plan.plan_arguments:add_rehearse", "build the ranks of a large run on one CPU, as a check"),
    "plan schedule": ("plan.plan_arguments:add_schedule", "search for a pipeline schedule for stages of unequal times"),
    "plan calibrate": ("plan.plan_arguments:add_calibrate", "calibrate the planner for a cluster from measurements"),
    "plan fit": ("plan.plan_arguments:add_fit", "fit the planner's constants to measured runs"),
    "data": ("data", "build and inspect token stores"),
    "eval": ("evaluate", "measure a checkpoint on data: loss, perplexity, accuracy, or the tasks of lm-eval"),
    "generate": ("generate", "generate text with a trained model"),
    "checkpoint": ("checkpoint.checkpoint_arguments", "list, inspect, verify, convert and remove checkpoints"),
    "topology": ("topology.topology_arguments", "show what a cluster is made of, and place ranks on it"),
    "bench": ("bench.bench_arguments", "measure this machine"),
    "doctor": ("doctor", "check this machine or job, and say what to fix"),
    "chaos": ("chaos", "break a run on purpose, to see whether it survives"),
    "explain": ("explain", "describe a configuration key: meaning, type, default, range"),
    "completion": ("completion", "print the tab completion script of a shell"),
}
"""Command -> (module of this package that defines its arguments, with `:function` if not add_arguments; its summary).

`plan` takes overrides, which argparse cannot tell from sub-commands, so `plan validate` is a command of its own."""
_EXAMPLES = (
    "hpc-train train model=llama_tiny train.steps=20",
    "hpc-train submit cluster.nodes=2 launch.partition=debug --dry-run",
    "hpc-train explain train.global_batch",
    "hpc-train submit --help",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A UserError becomes one line on stderr and exit code 2."""
    open_missing_streams()
    arguments = parse_command_line(argv)
    if _is_folder_gone():
        print("hpc-train: the current directory no longer exists; cd to one that does", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        # Progress bars and attached shells need escape sequences; the output of a job must not use them.
        with nullcontext() if _moves_cursor(arguments) else escaping_stdout():
            code: int = arguments.run(arguments)
        return code
    except UserError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"hpc-train: {one_line(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `hpc-train ... | head`
        sys.stderr.close()  # Python would complain at exit that it cannot flush stdout
        return EXIT_BROKEN_PIPE
    except OSError as error:
        from hpc_train.regular_files import NotRegularError

        of_input = error.errno == errno.ENAMETOOLONG or isinstance(error, NotRegularError)
        if not of_input and error.errno not in _STORAGE_ERRORS:
            raise
        if arguments.debug:
            traceback.print_exc()
        name = f"{error.filename}: " if error.filename else ""  # a write names no file
        name = name[:60] + "...: " if error.errno == errno.ENAMETOOLONG else name
        print(f"hpc-train: {one_line(f'{name}{error.strerror}')}", file=sys.stderr)
        return EXIT_USER_ERROR if of_input else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if str(error) == _NO_HOME and not arguments.debug:
            said = "a path begins with ~ and a name that is no user here; write it from / on"
            print(f"hpc-train: {said}", file=sys.stderr)
            return EXIT_USER_ERROR
        if not _is_damaged_checkpoint(error) or arguments.debug:
            raise
        print(f"hpc-train: {one_line(str(error))}", file=sys.stderr)
        return EXIT_FAILED


def _is_folder_gone() -> bool:
    """Whether the current directory was removed: no relative path means anything there, and libraries ask for it."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _is_damaged_checkpoint(error: Exception) -> bool:
    """Whether this is a CheckpointError, which only a command that has imported its module can raise."""
    errors = sys.modules.get("hpc_train.checkpoint.errors")
    return errors is not None and isinstance(error, errors.CheckpointError)


class _Parser(argparse.ArgumentParser):
    """Print errors on one line, and accept --debug everywhere; argparse uses this class for sub-commands too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # No default: a sub-command's default would overwrite a --debug that stands before it.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )

    def error(self, message: str) -> NoReturn:
        self.exit(
            EXIT_USER_ERROR, f"hpc-train: {one_line(message)}{_suggest_choice(message)}; see `{self.prog} --help`\n"
        )


def _suggest_choice(message: str) -> str:
    """Return "; did you mean X?" for argparse's message that a word is none of the choices; "" for any other."""
    match = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
    near = find_near_names(match[1], [name.strip("'") for name in match[2].split(", ")], TYPO) if match else []
    return f"; {did_you_mean(near)}" if near else ""


def _moves_cursor(arguments: argparse.Namespace) -> bool:
    return arguments.command in ("train", "attach", "bench", "top", "profile") or getattr(arguments, "watch", False)


def parse_command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides may stand before and after options; argparse takes only the first group."""
    words = join_plan_command(expand_help(sys.argv[1:] if argv is None else argv))
    words, remote_command = _split_remote_command(words)
    parser = make_parser(words)
    arguments, rest = parser.parse_known_args(words)
    if remote_command:
        arguments.words = remote_command
    unknown = [word for word in rest if word.startswith("-")] if hasattr(arguments, "overrides") else rest
    if unknown:
        innermost, _ = find_innermost_parser(parser, words)
        near = find_near_names(unknown[0].partition("=")[0], list_options(innermost), TYPO)
        hint = f"; {did_you_mean(near)}" if near else ""
        text = f"hpc-train: unknown option {one_line(' '.join(unknown))}{hint}; see `{innermost.prog} --help`\n"
        parser.exit(EXIT_USER_ERROR, text)
    if rest:
        arguments.overrides += rest
    return arguments


def _split_remote_command(words: list[str]) -> tuple[list[str], list[str]]:
    """Cut off the command after `--` of `attach`: argparse fails on options between RUN and `--`."""
    if "--" not in words or "attach" not in words[: words.index("--")]:
        return words, []
    separator = words.index("--")
    return words[:separator], words[separator + 1 :]


def expand_help(words: Sequence[str]) -> list[str]:
    """Turn `--help COMMAND` into `COMMAND --help`, and `--help KEY` into `explain KEY`."""
    words = list(words)
    if len(words) < 2 or words[0] not in ("-h", "--help") or words[1].startswith("-"):
        return words
    return [*words[1:], "--help"] if words[1] in COMMANDS else ["explain", *words[1:]]


def join_plan_command(words: Sequence[str]) -> list[str]:
    """Join `plan validate ...` into `"plan validate" ...`, also behind options."""
    joined = list(words)
    first = next((index for index, word in enumerate(joined) if not word.startswith("-")), len(joined))
    if joined[first : first + 1] == ["plan"] and (name := " ".join(joined[first : first + 2])) in COMMANDS:
        joined[first : first + 2] = [name]
    return joined


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands.

    words: the command line, if known. Then only the command that it names gets its arguments: the modules of the
    others are not imported.
    """
    named = None if words is None else next((word for word in words if not word.startswith("-")), "")
    parser: argparse.ArgumentParser = _Parser(
        prog="hpc-train", description="Describe, submit, train, checkpoint and resume PyTorch runs on Slurm clusters."
    )
    parser.epilog = "`hpc-train --help KEY` explains a configuration key."
    add_examples(parser, *_EXAMPLES)
    parser.set_defaults(debug=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        command = add_command(commands, name, summary)
        if named in (None, name):
            place, _, function = module.partition(":")
            getattr(import_module(f"{__package__}.{place}"), function or "add_arguments")(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
