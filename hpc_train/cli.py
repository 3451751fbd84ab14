"""The command `hpc-train`: parse, call one function, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from hpc_train import __version__
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.planner.cli import joined
from hpc_train.terminal import escaping_stdout, one_line

EXIT_INTERRUPTED = 130
_OVERRIDES = "key=value as in conf/, such as model=llama_1b optim.lr=1e-3 train.steps=1000"


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
    parser = make_parser()
    words, command_there = _split(joined(sys.argv[1:] if argv is None else argv))
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


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser: argparse.ArgumentParser = _Parser(
        prog="hpc-train", description="Describe, submit, train, checkpoint and resume PyTorch runs on Slurm clusters."
    )
    parser.set_defaults(debug=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_train(commands)
    _add_submit(commands)
    _add_runs(commands)
    _add_plan(commands)
    _add_data(commands)
    _add_checkpoint(commands)
    _add_topology(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_completion(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary)


def _add_config_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    command.add_argument("--config-dir", metavar="DIR", help="a folder laid out as conf/, whose options are added")
    command.add_argument("--cfg", action="store_true", help="print the composed configuration and stop")


def _add_multirun(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a sweep: each override may have several values, as in optim.lr=1e-3,1e-4 train.seed=range(3)",
    )


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "train", "train here; inside srun, torchrun or mpirun, join as a rank")
    _add_config_options(command)
    _add_multirun(command)
    command.set_defaults(run=_train)


def _add_submit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "submit", "submit the run to Slurm and return at once")
    _add_config_options(command)
    _add_multirun(command)
    command.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    command.add_argument("--json", action="store_true", help="print the answer as JSON")
    command.add_argument(
        "--after", action="append", default=[], metavar="RUN", help="start when this run is done; repeatable"
    )
    command.set_defaults(run=_submit)


def _add_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.launch.arguments import add_arguments

    add_arguments(commands)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.planner.cli import add_commands

    add_commands(commands)


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.data.cli import add_arguments

    command = _command(commands, "data", "build and inspect token stores")
    add_arguments(command)


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.checkpoint_arguments import add_arguments

    command = _command(commands, "checkpoint", "list, inspect, verify, convert and remove checkpoints")
    add_arguments(command)


def _add_topology(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.topology.cli import add_arguments

    command = _command(commands, "topology", "what a machine is made of, and where ranks go on it")
    add_arguments(command)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.bench.arguments import add_arguments

    add_arguments(_command(commands, "bench", "measure this machine"))


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "doctor", "what works here or in this job, what does not, and what to do")
    command.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    command.add_argument("--config-dir", metavar="DIR", help="a folder laid out as conf/, whose options are added")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    command.set_defaults(run=_doctor)


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "completion", 'tab completion: eval "$(hpc-train completion bash)"')
    command.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "query"),
        help="print its script; query: print the completions of a line",
    )
    command.add_argument("words", nargs="*", help="query: `--` and the words of the line after hpc-train")
    command.set_defaults(run=_completion)


def _train(arguments: argparse.Namespace) -> int:
    from hpc_train.runtime import stop

    request = stop.install()  # before anything slow is imported: a signal from now on is kept
    from hpc_train.launch.train import train_here

    if arguments.cfg:
        return _print_config(arguments)
    if arguments.multirun:
        from hpc_train.launch.sweep.local import train_sweep

        return train_sweep(arguments.overrides, arguments.config_dir, request)
    return train_here(arguments.overrides, arguments.config_dir, request)


def _submit(arguments: argparse.Namespace) -> int:
    from hpc_train.launch.submit import submit_command, with_slurm

    arguments.overrides = with_slurm(arguments.overrides)
    if arguments.cfg:
        return _print_config(arguments)
    a = arguments
    if a.multirun:
        from hpc_train.launch.sweep.submit import submit_sweep

        return submit_sweep(a.overrides, a.config_dir, a.dry_run, a.json, a.after)
    return submit_command(a.overrides, a.config_dir, a.dry_run, a.json, a.after)


def _doctor(arguments: argparse.Namespace) -> int:
    from hpc_train.doctor.command import doctor_command

    return doctor_command(arguments.overrides, arguments.config_dir, not arguments.json)


def _completion(arguments: argparse.Namespace) -> int:
    from hpc_train.completion import completions, script

    if arguments.shell != "query":
        print(script(arguments.shell), end="")
        return 0
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    for candidate in completions(make_parser(), joined(words)):
        print(candidate)
    return 0


def _print_config(arguments: argparse.Namespace) -> int:
    from hpc_train.config.compose import compose, to_yaml

    if getattr(arguments, "multirun", False):
        raise UserError("--cfg: shows one run; leave out -m, or give one value of each override")
    print(to_yaml(compose(arguments.overrides, arguments.config_dir)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
