"""`hpc-train explain KEY`: show what a configuration key means, its type, default, range, file and related keys."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpc_train.cli.arguments import add_examples, add_json

if TYPE_CHECKING:
    from hpc_train.config.keys.reference import KeyReference


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    command.add_argument("key", metavar="KEY", help="a key such as train.steps, or a part such as parallel.pipeline")
    add_json(command)
    add_examples(
        command,
        "hpc-train explain train.global_batch",
        "hpc-train explain parallel.pipeline",
        "hpc-train --help optim.lr",
    )
    command.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    from hpc_train.config.keys.reference import describe_key, list_related_keys

    keys = describe_key(args.key)
    if args.json:
        print(json.dumps([{**asdict(key), "related": list_related_keys(key)} for key in keys], indent=1))
    elif len({key.key for key in keys}) == 1:  # several kinds of model or data may declare one key
        print("\n\n".join(_format_key(key) for key in keys))
    else:
        print(_format_part(args.key, keys))
    return 0


def _format_key(key: KeyReference) -> str:
    from hpc_train.config.keys.reference import list_related_keys

    lines = [
        _name_with_variant(key),
        f"  {key.meaning}",
        f"  type:     {key.type}",
        f"  default:  {key.default or 'none; a value must be given'}",
    ]
    if key.range:
        lines.append(f"  range:    {key.range}")
    lines.append(f"  file:     {key.file}")
    if related := list_related_keys(key):
        lines.append(f"  related:  {', '.join(related)}")
    return "\n".join(lines)


def _format_part(part: str, keys: list[KeyReference]) -> str:
    from hpc_train.config.keys.reference import find_default_option, list_group_options

    lines = []
    if options := list_group_options(part):
        default = find_default_option(part)
        lines += [f"{part}= one of {', '.join(options)}{f' (default: {default})' if default else ''}", ""]
    width = max(len(_name_with_variant(key)) for key in keys)
    lines += [f"{_name_with_variant(key):{width}}  {key.meaning}" for key in keys]
    return "\n".join(lines)


def _name_with_variant(key: KeyReference) -> str:
    """Name a key, with the kind of model or data that declares it if not every run has it."""
    return f"{key.key} ({key.variant})" if key.variant else key.key
