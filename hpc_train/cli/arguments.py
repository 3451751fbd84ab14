"""Options that several commands share, and helpers to define arguments.

Nothing heavy is imported here or where commands define their arguments, so that a help text and a tab completion are
quick: the function that runs a command imports what it needs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch


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
        help="which weights of a run with optim.ema.decay (default: those of the run's own evaluations)",
    )


def whole_number(minimum: int) -> Callable[[str], int]:
    """Return an argument type that accepts whole numbers of at least `minimum`."""

    def parse(text: str) -> int:
        if text.isdecimal() and len(text) > 9:
            raise argparse.ArgumentTypeError(f"{text[:20]!r} is too large")
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {minimum} or more")
        return int(text)

    return parse


def new_path(text: str) -> str:
    """Accept the name of something new to write: not empty, and without control characters."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a file or folder")
    return text


_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def rank_ranges(text: str) -> tuple[range, ...]:
    """Parse ranks such as 3 or 0,8-15."""
    ranges = []
    for part in text.split(","):
        match = _RANKS.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 3 or 0,8-15")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(ranges)


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name; None: the GPU where there is one. Raises UserError for a missing GPU."""
    import torch

    from hpc_train.errors import UserError

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU here; leave it out")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def find_innermost_parser(
    parser: argparse.ArgumentParser, before: list[str]
) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser of the innermost sub-command in `before`, and the words after it."""
    for index, word in enumerate(before):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                return find_innermost_parser(action.choices[word], before[index + 1 :])
    return parser, before


def list_options(parser: argparse.ArgumentParser) -> list[str]:
    """List the options of a parser, such as --json."""
    return [flag for action in parser._actions for flag in action.option_strings]  # there is no public list
