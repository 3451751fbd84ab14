"""`hpc-train bench checkpoint`: start the ranks for every directory and number of them, collect, print."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from hpc_train.bench.checkpoint.result import (
    DCP,
    OPERATIONS,
    OURS,
    RESHARDINGS,
    SIDES,
    Line,
    Options,
    Ratio,
    Result,
    Setting,
)
from hpc_train.bench.local import leaving_when_told, wait
from hpc_train.errors import EXIT_DONE, UserError

_SETTING = "setting.json"
_REPLACED = 2
"""Times the state that lies in a directory at once, at most, besides that of every side."""


def checkpoint_command(options: Options, as_json: bool, plot: Path | None = None) -> int:
    """Measure and print. Returns the exit code; raises UserError for what cannot be measured."""
    _check(options, plot)
    settings = []
    with leaving_when_told():
        for directory in options.directories:
            for ranks in options.ranks:
                found = _measure(options, Path(directory), ranks)
                if isinstance(found, int):
                    return found
                settings.append(found)
    result = Result(options, settings, os.cpu_count() or 1)
    if plot is not None:
        from hpc_train.bench.checkpoint.plot import draw

        draw(result, plot)
    if as_json:
        print(result.to_json())
    else:
        from hpc_train.bench.checkpoint.table import show

        show(result)
    return EXIT_DONE


def _check(options: Options, plot: Path | None) -> None:
    if not 0 < options.gib < float("inf"):
        raise UserError(f"--gib {options.gib:g}: must be above 0")
    for name, values in (("ranks", options.ranks), ("rounds", (options.rounds,)), ("tensors", (options.tensors,))):
        for value in values:
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: must be at least 1")
    for name, given, known in (
        ("operations", options.operations, OPERATIONS),
        ("sides", options.sides, SIDES),
    ):
        if unknown := [it for it in given if it not in known]:
            raise UserError(f"--{name} {unknown[0]}: is none of {', '.join(known)}")
    if set(options.operations) <= set(RESHARDINGS):
        if 1 in options.ranks:
            raise UserError(f"--ranks 1: has no other layout, for {options.operations[0]}; use 2 or more")
        if not {OURS, DCP} & set(options.sides):
            raise UserError(f"--sides: only {OURS} and {DCP} load in another layout; name one of them")
    for directory in map(Path, options.directories):
        if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise UserError(f"--directory {directory}: is no directory that can be written to; make it first")
        free, need = shutil.disk_usage(directory).free, int((len(options.sides) + _REPLACED) * options.gib * 2**30)
        if free < need:
            raise UserError(
                f"--directory {directory}: {free / 2**30:.1f} GiB are free and {need / 2**30:.1f} GiB are needed;"
                " choose another, or a smaller --gib"
            )
    if plot is not None and find_spec("matplotlib") is None:
        raise UserError("--plot: matplotlib is not installed; pip install 'hpc_train[plot]'")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: its folder is not there; make it first")


def _measure(options: Options, directory: Path, ranks: int) -> Setting | int:
    """What the ranks found; their exit code if they failed. Nothing of it stays in the directory."""
    with (
        tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as meeting,
        tempfile.TemporaryDirectory(prefix="hpc_train-bench-", dir=directory) as place,
    ):
        base = [sys.executable, "-m", "hpc_train.bench.checkpoint.rank"]
        rest = [str(ranks), json.dumps(asdict(options)), place, meeting]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                processes.append(subprocess.Popen([*base, str(rank), *rest], env=environment))
            code = wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return code or _setting(json.loads((Path(meeting) / _SETTING).read_text()))


def _setting(body: dict[str, object]) -> Setting:
    rows: list[dict[str, object]] = body.pop("lines")  # type: ignore[assignment]
    lines = []
    for row in rows:
        over: dict[str, dict[str, float]] = row.pop("over")  # type: ignore[assignment]
        lines.append(Line(**row, over={base: Ratio(**it) for base, it in over.items()}))  # type: ignore[arg-type]
    return Setting(**body, lines=lines)  # type: ignore[arg-type]
