"""Options that several benchmarks have, and how a benchmark becomes a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from hpc_train.cli.arguments import CommandGroup, add_command

PLOT_HELP = "also plot the result, as .png or .svg"


def add_benchmark(
    kinds: CommandGroup, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add a benchmark, and return its parser. run: takes the parsed arguments and returns the exit code."""
    benchmark = add_command(kinds, name, summary)
    benchmark.set_defaults(run=run)
    return benchmark


def add_number(benchmark: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    """Add an option that takes a whole number."""
    benchmark.add_argument(option, type=int, default=default, metavar="N", help=f"{text} (default {default})")
