"""Write the reference pages from the code: `python docs/generate.py [FOLDER]`.

The pages are committed, so that they can be read on a code host; a test compares them with what this writes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from hpc_train.cli.main import make_parser
from hpc_train.config.keys.reference import KeyReference, find_default_option, list_group_options, list_keys
from hpc_train.models.hf.families import format_family_table
from hpc_train.parallel.rules.support_table import format_support_table

REFERENCE = Path(__file__).parent / "reference"
_COLUMNS = "90"


def main(folder: Path = REFERENCE) -> None:
    """Write one page for the configuration, one for the commands, and the table of one on parallelism."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("configuration.md", configuration_page()), ("commands.md", commands_page())):
        (folder / name).write_text(text, encoding="utf-8")
    if folder == REFERENCE:
        _replace_table(folder.parent / "parallelism.md", format_support_table())
        _replace_table(folder.parent / "transformers_models.md", format_family_table())


def configuration_page() -> str:
    """Every key with type, default, range and meaning, by part of the configuration."""
    lines = [
        "# Configuration keys",
        "",
        "Generated from the schema; `hpc-train explain KEY` prints one. Set a key as `key=value` on the command line",
        "or in a file of `conf/`. The defaults are the schema's; a file of `conf/` may choose others.",
    ]
    for part, keys in groupby(list_keys(), key=lambda item: item.key.partition(".")[0]):
        lines += ["", f"## {part}", ""]
        if options := list_group_options(part):
            default = find_default_option(part)
            lines += [
                f"Choose one with `{part}=`: {', '.join(options)}{f' (default: {default})' if default else ''}.",
                "",
            ]
        lines += ["| key | type | default | range | meaning |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(item) for item in keys]
    return "\n".join(lines) + "\n"


def _replace_table(page: Path, table: str) -> None:
    """Put this table in place of the page's first one."""
    page.write_text(re.sub(r"(^\|.*\n)+", lambda _: table, page.read_text(), count=1, flags=re.MULTILINE))


def _row(item: KeyReference) -> str:
    key = f"`{item.key}`" + (f" ({item.variant})" if item.variant else "")
    default = f"`{item.default}`" if item.default else "must be given"
    cells = (key, item.type, default, item.range, item.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def commands_page() -> str:
    """The help of every command."""
    os.environ["COLUMNS"] = _COLUMNS
    lines = ["# Commands", "", "Generated: what `hpc-train COMMAND --help` prints.", ""]
    for parser in _parsers(make_parser()):
        lines += [f"## {parser.prog}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from _parsers(child)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE)
