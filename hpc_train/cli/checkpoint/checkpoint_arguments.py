"""Define the arguments of `hpc-train checkpoint` and its sub-commands.

What a sub-command does is imported when it runs: ls, inspect, prune and mark work without torch.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hpc_train.cli.arguments import CommandGroup, add_command, add_examples, add_json, new_path, whole_number

EXPORTS = ("hf", "safetensors", "dcp")
IMPORTS = ("hf", "safetensors", "dcp", "torch")
_WHERE = "run directory, directory of checkpoints, or one step-<n>"
_NEWEST = f"{_WHERE}; of several steps the newest"
CommandFunction = Callable[[argparse.Namespace], int]
_natural, _positive = whole_number(0), whole_number(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `checkpoint`."""
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
    commands: CommandGroup, name: str, summary: str, run: CommandFunction, *positional: tuple[str, str]
) -> argparse.ArgumentParser:
    command = add_command(commands, name, summary)
    for argument, about in positional:
        kind = new_path if argument == "out" else str
        command.add_argument(argument, metavar=argument.upper(), type=kind, help=about)
    add_json(command)
    command.set_defaults(run=lambda arguments: _run_guarded(run, arguments))
    return command


def _run_guarded(run: CommandFunction, args: argparse.Namespace) -> int:
    """Run a sub-command; a damaged checkpoint or a failing disk becomes one line and exit code 1."""
    _import_numpy()
    from hpc_train.checkpoint.errors import CheckpointError, format_error
    from hpc_train.terminal import escape_controls

    try:
        return run(args)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise  # a mistake of the user, which the command line reports
        if args.debug:
            traceback.print_exc()
        print(f"hpc-train: {escape_controls(format_error(error))}", file=sys.stderr)
        return 1


def _import_numpy() -> None:
    """Import NumPy without OpenBLAS's threads: one for each core, and they spin; nothing here multiplies matrices."""
    user_set_threads = "OPENBLAS_NUM_THREADS" in os.environ
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import numpy as np  # noqa: F401
    finally:
        if not user_set_threads:
            del os.environ["OPENBLAS_NUM_THREADS"]


def _add_ls(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.list_steps import print_steps

        return print_steps(arguments.dir, arguments.verify, arguments.json)

    summary = "list checkpoint steps in order of commit, and leftovers of unfinished saves"
    command = _add_command(commands, "ls", summary, run, ("dir", _WHERE))
    command.add_argument("--verify", action="store_true", help="also read every step and compare its checksums")
    add_examples(command, "hpc-train checkpoint ls runs/first", "hpc-train checkpoint ls runs/first --verify --json")


def _add_inspect(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.inspect import InspectOptions, inspect_command

        return inspect_command(arguments.dir, InspectOptions(arguments.tensors, arguments.index), arguments.json)

    summary = "show the tensors, files, storage and origin of a step"
    command = _add_command(commands, "inspect", summary, run, ("dir", _NEWEST))
    command.add_argument(
        "--tensors", action="store_true", help="also list every tensor: type, shape, bytes and how it is cut"
    )
    command.add_argument(
        "--index", action="store_true", help="write index.h5, through which any HDF5 tool sees whole tensors"
    )
    add_examples(command, "hpc-train checkpoint inspect runs/first --tensors")


def _add_verify(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.verify import verify_command

        return verify_command(arguments.dir, arguments.step, arguments.all, arguments.jobs, arguments.json)

    summary = "read a step and compare its checksums; exit code 1 if it is damaged"
    command = _add_command(commands, "verify", summary, run, ("dir", _NEWEST))
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", metavar="N", type=_natural, help="verify this step")
    which.add_argument("--all", action="store_true", help="verify every step")
    command.add_argument("--jobs", metavar="N", type=_positive, help="threads (default: one per core, at most 8)")
    add_examples(
        command, "hpc-train checkpoint verify runs/first", "hpc-train checkpoint verify runs/first --all --json"
    )


def _add_reshard(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.convert import reshard_command

        return reshard_command(arguments.dir, arguments.out, arguments.ranks, arguments.dim, arguments.json)

    summary = "rewrite a step into another number of files (loading never needs this)"
    where = ("dir", _NEWEST)
    command = _add_command(commands, "reshard", summary, run, where, ("out", "directory in which to write step-<n>"))
    command.add_argument("--ranks", metavar="N", type=_positive, required=True, help="number of files to write")
    command.add_argument(
        "--dim", metavar="D", type=_natural, default=0, help="tensor dimension to cut (default 0, rows)"
    )
    add_examples(command, "hpc-train checkpoint reshard runs/first resharded --ranks 8")


def _add_export(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.checkpoint.convert.export_step import ExportOptions
        from hpc_train.cli.checkpoint.convert import export_command

        config = Path(arguments.config).expanduser() if arguments.config else None
        format = "adapter" if arguments.adapter else arguments.format or ("hf" if arguments.merged else None)
        if format is None:
            command.error("give --format, --adapter or --merged")
        if arguments.adapter and arguments.merged:
            command.error("--adapter exports adapters alone, and --merged the weights with them; give one of these")
        options = ExportOptions(
            format=format,
            weights=arguments.weights,
            dtype=arguments.dtype,
            config=config,
            merged=arguments.merged,
            averaged=arguments.average,
            base=arguments.base,
        )
        return export_command(arguments.dir, arguments.out, options, arguments.json)

    summary = "write a step in the format of another library"
    where = ("dir", _NEWEST)
    command = _add_command(commands, "export", summary, run, where, ("out", "new folder to write"))
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--format",
        choices=EXPORTS,
        help="hf: for transformers (Llama, GPT-2, ViT; no tokenizer); safetensors: our tensor names; dcp: for torch",
    )
    which.add_argument("--adapter", action="store_true", help="only the LoRA or DoRA adapters, as PEFT's files")
    command.add_argument(
        "--merged", action="store_true", help="add the adapters to the weights they change (--format is hf by default)"
    )
    command.add_argument("--weights", action="store_true", help="leave out the optimizer state (hf never has it)")
    command.add_argument(
        "--average", action="store_true", help="write the average of the weights (optim.ema.decay) in their place"
    )
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="convert the weights (default: as saved)"
    )
    command.add_argument(
        "--config",
        metavar="FILE",
        help="hf, --adapter, --merged: the run's config.yaml, if it is not in the run directory",
    )
    command.add_argument("--base", metavar="FOLDER", help="where the run's model.path is now, if it was moved")
    add_examples(
        command,
        "hpc-train checkpoint export runs/first hf_model --format hf --dtype bfloat16",
        "hpc-train checkpoint export runs/first/checkpoints/step-100 weights --format safetensors --weights",
        "hpc-train checkpoint export runs/tuned adapter --adapter",
    )


def _add_import(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.checkpoint.convert.import_weights import ImportOptions
        from hpc_train.cli.checkpoint.convert import import_command

        options = ImportOptions(arguments.format, arguments.prefix, arguments.dtype, arguments.ranks)
        return import_command(arguments.source, arguments.run_dir, options, arguments.json)

    summary = "make step 0 of a run from the weights of another library"
    command = _add_command(
        commands,
        "import",
        summary,
        run,
        ("source", "file or folder to read"),
        ("run_dir", "run directory without steps, or a new one"),
    )
    command.add_argument(
        "--format",
        choices=IMPORTS,
        required=True,
        help="hf: a transformers folder; safetensors, dcp, torch: files with our tensor names (pickles are not run)",
    )
    command.add_argument(
        "--prefix", metavar="P", default="", help="import only names that begin with P, such as model., without it"
    )
    command.add_argument(
        "--dtype", choices=("float32", "float64"), help="convert the weights (default: narrower floats to float32)"
    )
    command.add_argument("--ranks", metavar="N", type=_positive, default=1, help="number of files to write (default 1)")
    add_examples(
        command,
        "hpc-train checkpoint import hf_model runs/tuned --format hf",
        "hpc-train checkpoint import model.pt runs/tuned --format torch --prefix model.",
    )


def _add_prune(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.maintain import PruneOptions, prune_command

        options = PruneOptions(arguments.keep, arguments.keep_every, arguments.keep_best, arguments.dry_run)
        return prune_command(arguments.dir, options, arguments.json)

    summary = "remove all but the newest steps, and leftovers of unfinished saves"
    command = _add_command(commands, "prune", summary, run, ("dir", "run directory or directory of checkpoints"))
    command.add_argument("--keep", metavar="K", type=_positive, required=True, help="keep the newest K steps")
    command.add_argument("--keep-every", metavar="N", type=_natural, default=0, help="also keep multiples of N")
    command.add_argument(
        "--keep-best", metavar="N", type=_natural, default=0, help="also keep the N steps of lowest validation loss"
    )
    command.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    add_examples(command, "hpc-train checkpoint prune runs/first --keep 2 --keep-every 1000 --dry-run")


def _add_mark(commands: CommandGroup) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from hpc_train.cli.checkpoint.maintain import mark_command

        return mark_command(arguments.where, arguments.step, arguments.bad, arguments.json)

    summary = "mark a step bad, so that runs do not resume from it, or remove the mark"
    where = ("where", "step-<n>, number of a step in the current directory, or a directory together with --step")
    command = _add_command(commands, "mark", summary, run, where)
    command.add_argument("--step", metavar="N", type=_natural, help="step of the directory")
    mark = command.add_mutually_exclusive_group(required=True)
    mark.add_argument(
        "--bad", metavar="REASON", nargs="?", const="", help="mark it bad; ls and inspect show the reason"
    )
    mark.add_argument("--good", action="store_true", help="remove the mark")
    add_examples(
        command,
        "hpc-train checkpoint mark runs/first --step 900 --bad 'loss diverged'",
        "hpc-train checkpoint mark runs/first/checkpoints/step-900 --good",
    )
