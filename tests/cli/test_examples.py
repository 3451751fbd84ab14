"""The help of every command has examples; each parses, and its settings compose."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from hpc_train.cli.main import make_parser, parse_command_line
from hpc_train.config.compose import compose

MAX_EXAMPLES = 4
LONGEST_SUMMARY = 90


def leaf_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that run something, not of those that only have sub-commands."""
    children = [
        child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for child in action.choices.values()
    ]
    if not children:
        yield parser
    for child in children:
        yield from leaf_parsers(child)


def examples(parser: argparse.ArgumentParser) -> list[str]:
    return [line.strip() for line in (parser.epilog or "").partition("examples:\n")[2].splitlines()]


COMMANDS = {parser.prog.removeprefix("hpc-train "): parser for parser in leaf_parsers(make_parser())}
LINES = [(name, line) for name, parser in COMMANDS.items() for line in examples(parser)]
LINES += [("", line) for line in examples(make_parser())]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_of_itself(command: str) -> None:
    lines = examples(COMMANDS[command])
    assert 1 <= len(lines) <= MAX_EXAMPLES
    own = f"hpc-train {command}"
    assert all(own in line or (command == "explain" and "hpc-train --help" in line) for line in lines)
    assert "\n".join(f"  {line}" for line in lines) in COMMANDS[command].format_help()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_description_is_one_sentence_on_one_line(command: str) -> None:
    text = COMMANDS[command].description or ""
    assert text.endswith(".")
    assert text[0].isupper()
    assert len(text) <= LONGEST_SUMMARY


@pytest.mark.parametrize(("command", "line"), LINES, ids=str)
def test_an_example_parses_and_its_settings_compose(command: str, line: str) -> None:
    if substituted := re.search(r"\$\((.*)\)", line):
        line = substituted[1]
    words = shlex.split(line.partition("hpc-train ")[2])  # also behind srun or in a pipe
    if words[-1] == "--help":
        with pytest.raises(SystemExit) as stopped:
            parse_command_line(words)
        assert stopped.value.code == 0
        return
    arguments = parse_command_line(words)
    if command == "profile" and "=" not in arguments.overrides[0]:
        return  # a run in place of settings
    if hasattr(arguments, "overrides") and not getattr(arguments, "multirun", False):
        compose(arguments.overrides)
