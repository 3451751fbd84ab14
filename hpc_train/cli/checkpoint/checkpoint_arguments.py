"""`hpc-train checkpoint`: the arguments of its sub-commands.

What a sub-command does is imported when it runs: ls, inspect, prune and mark do without torch.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any

EXPORTS = ("hf", "safetensors", "dcp")
IMPORTS = ("hf", "safetensors", "dcp", "torch")
_WHERE = "a run directory, a directory of checkpoints, or a step-<n> of one"
_Commands = Any
CommandFunction = Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the sub-commands; each sets `run`, a function of the parsed arguments."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_ls(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_reshard(commands)
    _add_export(commands)
    _add_import(commands)
    _add_prune(commands)
    _add_mark(commands)


def _add_command(
    commands: _Commands, name: str, summary: str, run: CommandFunction, *positional: tuple[str, str]
) -> Any:
    command = commands.add_parser(name, help=summary, description=summary)
    for argument, about in positional:
        command.add_argument(argument, metavar=argument.upper(), help=about)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=lambda arguments: _run_guarded(run, arguments))
    return command


def _run_guarded(run: CommandFunction, arguments: argparse.Namespace) -> int:
    """What the machine does wrong, a damaged checkpoint included, is one line and exit code 1."""
    from hpc_train.checkpoint.errors import CheckpointError, format_error
    from hpc_train.terminal import escape_controls

    try:
        return run(arguments)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError) as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"hpc-train: {escape_controls(format_error(error))}", file=sys.stderr)
        return 1


def _add_ls(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.inspect import ls_command

        return ls_command(arguments.dir, arguments.verify, arguments.json)

    summary = "list the checkpoint steps, oldest commit first, and what dead writers left"
    command = _add_command(commands, "ls", summary, run, ("dir", _WHERE))
    command.add_argument(
        "--verify", action="store_true", help="read every step and compare its checksums; without it `verified` is null"
    )


def _add_inspect(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.inspect import InspectOptions, inspect_command

        return inspect_command(arguments.dir, InspectOptions(arguments.tensors, arguments.index), arguments.json)

    summary = "what a step holds: tensors, layout, files, where it lies, and when it was saved"
    command = _add_command(commands, "inspect", summary, run, ("dir", f"{_WHERE}; the newest step of several"))
    command.add_argument("--tensors", action="store_true", help="every tensor: type, shape, bytes and how it is cut")
    command.add_argument("--index", action="store_true", help="write index.h5, a list of all tensors for any HDF5 tool")


def _add_verify(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.verify import verify_command

        return verify_command(arguments.dir, arguments.step, arguments.all, arguments.jobs, arguments.json)

    summary = "read a step and compare it with its checksums; exit code 1 and what is wrong if it is damaged"
    command = _add_command(commands, "verify", summary, run, ("dir", f"{_WHERE}; the newest step of several"))
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", metavar="N", type=_natural, help="this step")
    which.add_argument("--all", action="store_true", help="every step")
    command.add_argument("--jobs", metavar="N", type=_positive, help="threads (default: one a core, at most 8)")


def _add_reshard(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.convert import reshard_command

        return reshard_command(arguments.dir, arguments.out, arguments.ranks, arguments.dim, arguments.json)

    summary = "write a step again in another number of files, in less than 1 GiB of memory; loading needs no such step"
    where = ("dir", f"{_WHERE}; the newest step of several")
    command = _add_command(commands, "reshard", summary, run, where, ("out", "directory that gets the step-<n>"))
    command.add_argument("--ranks", metavar="N", type=_positive, required=True, help="files to write")
    command.add_argument("--dim", metavar="D", type=_natural, default=0, help="dimension that is cut (default 0, rows)")


def _add_export(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.convert import ExportOptions, export_command

        options = ExportOptions(arguments.format, arguments.weights, arguments.dtype, arguments.config)
        return export_command(arguments.dir, arguments.out, options, arguments.json)

    summary = "write a step in the format of another library"
    where = ("dir", f"{_WHERE}; the newest step of several")
    command = _add_command(commands, "export", summary, run, where, ("out", "folder to make"))
    command.add_argument(
        "--format",
        choices=EXPORTS,
        required=True,
        help="hf: a folder for transformers (Llama, GPT-2, ViT; no tokenizer); safetensors: our names; dcp: of torch",
    )
    command.add_argument("--weights", action="store_true", help="without optimizer state (hf never has it)")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights that are written")
    command.add_argument("--config", metavar="FILE", help="hf: the run's config.yaml, where it is not beside the step")


def _add_import(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.convert import ImportOptions, import_command

        options = ImportOptions(arguments.format, arguments.prefix, arguments.dtype, arguments.ranks)
        return import_command(arguments.source, arguments.run_dir, options, arguments.json)

    summary = "make step 0 of a run from weights of another library; the run then starts from them"
    command = _add_command(
        commands, "import", summary, run, ("source", "file or folder to read"), ("run_dir", "run directory, new or not")
    )
    command.add_argument(
        "--format",
        choices=IMPORTS,
        required=True,
        help="hf: a folder of transformers; safetensors, dcp, torch (read with weights_only): under our names",
    )
    command.add_argument("--prefix", metavar="P", default="", help="take names that begin with P, without it: `model.`")
    command.add_argument(
        "--dtype", choices=("float32", "float64"), help="of the weights (default: narrower floats become float32)"
    )
    command.add_argument("--ranks", metavar="N", type=_positive, default=1, help="files to write (default 1)")


def _add_prune(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.maintain import PruneOptions, prune_command

        options = PruneOptions(arguments.keep, arguments.keep_every, arguments.keep_best, arguments.dry_run)
        return prune_command(arguments.dir, options, arguments.json)

    summary = "remove all but the newest whole steps, and what dead writers left"
    command = _add_command(commands, "prune", summary, run, ("dir", "a run directory or a directory of checkpoints"))
    command.add_argument("--keep", metavar="K", type=_positive, required=True, help="newest steps to keep")
    command.add_argument("--keep-every", metavar="N", type=_natural, default=0, help="and all multiples of N")
    command.add_argument(
        "--keep-best", metavar="N", type=_natural, default=0, help="and the N of lowest validation loss"
    )
    command.add_argument("--dry-run", action="store_true", help="remove nothing, say what would be")


def _add_mark(commands: _Commands) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.maintain import mark_command

        return mark_command(arguments.where, arguments.step, arguments.bad, arguments.json)

    summary = "mark a step bad, which a run then does not go on from by itself, or take the mark away"
    where = ("where", "a step-<n>; N, a step in the current directory; or a directory of several, with --step")
    command = _add_command(commands, "mark", summary, run, where)
    command.add_argument("--step", metavar="N", type=_natural, help="this step of the directory")
    how = command.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--bad", metavar="REASON", nargs="?", const="", help="mark it; the reason is shown by ls and inspect"
    )
    how.add_argument("--good", action="store_true", help="take the mark away")


def _positive(text: str) -> int:
    return _number(text, 1)


def _natural(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {least}")
    return int(text)
