"""`hpc-train bench gemm`: what the device at hand multiplies and copies, for the planner's calibration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.bench.gemm.result import Result, shapes
from hpc_train.errors import EXIT_DONE, UserError

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Options:
    """Of the command."""

    precisions: Sequence[str] = ("fp32", "bf16")
    smallest: int = 256
    largest: int = 4096
    rounds: int = 5
    json: bool = False
    plot: str | None = None
    out: str | None = None

    def check(self) -> None:
        """Raises UserError, one line, for what cannot be measured or written."""
        if not 16 <= self.smallest <= self.largest <= 1 << 16:
            raise UserError(f"--min {self.smallest} --max {self.largest}: sizes go from 16 to 65536")
        if self.rounds < 1:
            raise UserError(f"--rounds {self.rounds}: must be at least 1")
        for option, name in (("--plot", self.plot), ("--out", self.out)):
            if name is not None and (Path(name).is_dir() or not Path(name).parent.is_dir()):
                raise UserError(f"{option} {name}: name a file in a folder that exists")
        if self.plot is not None and Path(self.plot).suffix not in (".png", ".svg"):
            raise UserError(f"--plot {self.plot}: must end in .png or .svg")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command line."""
    usual = Options()
    told = f"repeatable (default {' and '.join(usual.precisions)})"
    command.add_argument("--precision", action="append", choices=PRECISIONS, help=told)
    command.add_argument("--min", type=int, default=usual.smallest, help=f"smallest width (default {usual.smallest})")
    command.add_argument("--max", type=int, default=usual.largest, help=f"largest width (default {usual.largest})")
    command.add_argument("--rounds", type=int, default=usual.rounds, help=f"of each (default {usual.rounds})")
    command.add_argument("--out", metavar="FILE", help="write the result, for `hpc-train plan calibrate --gemm FILE`")
    command.add_argument("--plot", metavar="FILE", help="draw speed against size (.png or .svg)")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def from_arguments(arguments: argparse.Namespace) -> Options:
    """What `add_arguments` has parsed."""
    a = arguments
    precisions = tuple(dict.fromkeys(a.precision or Options().precisions))
    return Options(precisions, a.min, a.max, a.rounds, a.json, a.plot, a.out)


def gemm_command(options: Options) -> int:
    """Measure, print and write. Raises UserError for what cannot be measured or written."""
    options.check()
    from hpc_train.bench.gemm.measure import measure

    return finish(measure(options.precisions, shapes(options.smallest, options.largest), options.rounds), options)


def finish(result: Result, options: Options) -> int:
    """Print and write what was found."""
    from hpc_train.bench.gemm import show

    if options.json:
        print(result.to_json())
    else:
        show.show(result)
    if options.out is not None:
        Path(options.out).write_text(result.to_json() + "\n")
    if options.plot is not None:
        try:
            show.write_plot(result, Path(options.plot))
        except ImportError:
            raise UserError("--plot: needs matplotlib; pip install 'hpc_train[plot]'") from None
    return EXIT_DONE
