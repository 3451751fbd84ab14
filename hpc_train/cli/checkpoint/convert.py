"""`hpc-train checkpoint reshard`, `export` and `import`: rewrite a step, also in the format of another library."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path

from hpc_train.checkpoint.convert.export_step import ExportOptions, export_step
from hpc_train.checkpoint.convert.import_weights import ImportOptions, import_weights
from hpc_train.checkpoint.convert.reshard import reshard_step
from hpc_train.checkpoint.storage.step_selection import open_one_step
from hpc_train.cli.output import print_json, progress_bar
from hpc_train.errors import UserError
from hpc_train.units import format_bytes


def reshard_command(where: str, out: str, ranks: int, dim: int, json: bool) -> int:
    """Rewrite a step under the directory `out`, and print where it is; returns 0."""
    directory = Path(out).expanduser().absolute()
    resharded = reshard_step(open_one_step(where), directory, ranks, dim, partial(progress_bar, quiet=json))
    if json:
        facts = {"step": resharded.step, "path": str(resharded.path)}
        print_json({**facts, "files": resharded.files, "bytes": resharded.bytes})
    else:
        print(f"{resharded.path}: {format_bytes(resharded.bytes)} in {_count_files(resharded.files)}")
    return 0


def export_command(where: str, out: str, options: ExportOptions, json: bool) -> int:
    """Write a step into the new folder `out`, and print what is in it; returns 0."""
    step = open_one_step(where)
    folder = Path(out).expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{out}: exists; export into a new folder")
    exported = export_step(step, folder, options, partial(progress_bar, quiet=json))
    if exported.problem is not None:
        print(f"warning: {exported.problem}", file=sys.stderr)
    if json:
        facts = {"path": str(folder), "format": options.format}
        print_json({**facts, "tensors": exported.tensors, "files": exported.files})
    else:
        size = f"{exported.tensors:,} tensors, {format_bytes(exported.bytes)}"
        print(f"{folder}: {size}, as {options.format} in {_count_files(len(exported.files))}")
    return 0


def import_command(source: str, run_dir: str, options: ImportOptions, json: bool) -> int:
    """Make step 0 of a run, and print the command that trains from it; returns 0."""
    path, run = Path(source).expanduser().absolute(), Path(run_dir).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{source}: no such file or folder")
    imported = import_weights(path, run, options, partial(progress_bar, quiet=json))
    if json:
        facts = {"path": str(imported.path), "tensors": imported.tensors, "bytes": imported.bytes}
        print_json({**facts, "left_out": imported.left_out, "overrides": imported.overrides})
        return 0
    size = f"{imported.tensors:,} tensors, {format_bytes(imported.bytes)}"
    print(f"{imported.path}: {size}; left out: {imported.left_out}")
    print(f"train from step 0, with a fresh optimizer: hpc-train train {shlex.join(imported.overrides)}")
    return 0


def _count_files(count: int) -> str:
    return f"{count} file{'s' if count != 1 else ''}"
