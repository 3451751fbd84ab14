"""Define the options of `bench collectives`, and the command line that passes them to local ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_train.bench.collectives.definitions import ALGORITHMS, DTYPE_BYTES, OPERATIONS
from hpc_train.errors import UserError
from hpc_train.units import BYTES_OF_SUFFIX

BACKENDS = ("torch", "mpi")
Output = Literal["table", "plain", "json"]
_MAX_BYTES = 1 << 40


@dataclass(frozen=True)
class CollectivesOptions:
    """Options of `bench collectives`."""

    smallest: str = "1K"
    """Bytes, with K, M, G for powers of 1024."""
    largest: str = "64M"
    factor: int = 4
    rounds: int = 5
    iterations: int = 20
    """Maximum calls of a case in a round; slow cases are called fewer times."""
    operations: tuple[str, ...] = tuple(operation.name for operation in OPERATIONS)
    algorithms: tuple[str, ...] = ALGORITHMS
    backends: tuple[str, ...] = ()
    """Names of BACKENDS; empty: torch, and mpi if MPI started the ranks."""
    output: Output = "table"
    plot: str | None = None
    out: str | None = None
    """The calibration file to write."""

    @property
    def sizes(self) -> list[int]:
        """Sizes in bytes, in rising order."""
        size, largest = parse_size("--min", self.smallest), parse_size("--max", self.largest)
        sizes = []
        while size <= largest:
            sizes.append(size)
            size *= self.factor
        return sizes

    def check(self) -> None:
        """Raise UserError for options that cannot be measured and files that cannot be written."""
        for name, value, least in (
            ("factor", self.factor, 2),
            ("rounds", self.rounds, 2),
            ("iterations", self.iterations, 1),
        ):
            if value < least:
                raise UserError(f"--{name} {value}: must be at least {least}")
        if not self.sizes:
            raise UserError(f"--min {self.smallest} is above --max {self.largest}")
        if self.out is not None:
            _check_sizes(self.sizes)
        for option, path in (("--plot", self.plot), ("--out", self.out)):
            if path is not None:
                _check_writable(option, Path(path))
        if self.plot is not None:
            _check_plot(Path(self.plot))

    def words(self) -> list[str]:
        """Return the command-line words that give these options."""
        words = ["--min", self.smallest, "--max", self.largest, "--factor", str(self.factor)]
        words += ["--rounds", str(self.rounds), "--iterations", str(self.iterations)]
        for option, names in (
            ("--operation", self.operations),
            ("--algorithm", self.algorithms),
            ("--backend", self.backends),
        ):
            words += [word for name in names for word in (option, name)]
        words += [] if self.output == "table" else [f"--{self.output}"]
        for option, path in (("--plot", self.plot), ("--out", self.out)):
            words += [option, path] if path is not None else []
        return words


def parse_size(option: str, text: str) -> int:
    """Parse a size such as 512, 1K, 64M or 1G into bytes. Raises UserError, also below one element."""
    match = re.fullmatch(r"(\d{1,12})([KMG]?)", text.upper().removesuffix("B"), re.ASCII)
    size = int(match[1]) * BYTES_OF_SUFFIX[match[2]] if match else 0
    if not DTYPE_BYTES <= size <= _MAX_BYTES:
        raise UserError(f"{option} {text}: must be a size of at least {DTYPE_BYTES} bytes, such as 4K, 64M or 1G")
    return size


def _check_sizes(sizes: list[int]) -> None:
    if len(sizes) < 2:
        raise UserError("--out: latency and bandwidth need two sizes or more; set --max above --min")


def _check_writable(option: str, path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{option} {path}: {what}; name a file in a folder that exists")


def _check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--plot {path}: must end in .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--plot: needs matplotlib; pip install 'hpc_train[plot]'") from None
