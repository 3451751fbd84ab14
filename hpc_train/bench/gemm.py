"""`hpc-train bench gemm`: measure matrix products and a copy on this device, to calibrate the planner.

The command, its result and the result's file. Needs no torch; gemm_device.py does the work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.errors import EXIT_DONE, UserError

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class GemmOptions:
    """Options of `bench gemm`."""

    precisions: Sequence[str] = ("fp32", "bf16")
    smallest: int = 256
    largest: int = 4096
    rounds: int = 5
    json: bool = False
    plot: str | None = None
    out: str | None = None

    def check(self) -> None:
        """Raise UserError for sizes that cannot be measured and files that cannot be written."""
        if not 16 <= self.smallest <= self.largest <= 1 << 16:
            raise UserError(f"--min {self.smallest} --max {self.largest}: sizes go from 16 to 65536")
        if self.rounds < 1:
            raise UserError(f"--rounds {self.rounds}: must be at least 1")
        for option, name in (("--plot", self.plot), ("--out", self.out)):
            if name is not None and (Path(name).is_dir() or not Path(name).parent.is_dir()):
                raise UserError(f"{option} {name}: name a file in a folder that exists")
        if self.plot is not None and Path(self.plot).suffix not in (".png", ".svg"):
            raise UserError(f"--plot {self.plot}: must end in .png or .svg")


def run_gemm_command(options: GemmOptions) -> int:
    """Measure the device, print the result and write its files. Raises UserError as GemmOptions.check."""
    options.check()
    from hpc_train.bench.gemm_device import measure_device

    return report_result(
        measure_device(options.precisions, list_product_shapes(options.smallest, options.largest), options.rounds),
        options,
    )


def report_result(result: GemmResult, options: GemmOptions) -> int:
    """Print the result, and write it to the files that were asked for."""
    from hpc_train.bench import gemm_device

    if options.json:
        print(result.to_json())
    else:
        gemm_device.print_gemm_result(result)
    if options.out is not None:
        Path(options.out).write_text(result.to_json() + "\n")
    if options.plot is not None:
        try:
            gemm_device.plot_gemm_result(result, Path(options.plot))
        except ImportError:
            raise UserError("--plot: needs matplotlib; pip install 'hpc_train[plot]'") from None
    return EXIT_DONE


RESULT_VERSION = 1


@dataclass(frozen=True)
class MatrixProduct:
    """Time of one product [m, k] x [k, n] in one precision."""

    precision: str
    m: int
    n: int
    k: int
    seconds: float
    """Seconds, median over rounds."""

    @property
    def tflops(self) -> float:
        return 2e-12 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class GemmResult:
    """Measured products and copy of one device."""

    device: str
    """Name that torch gives the GPU, or cpu."""
    date: str
    """ISO 8601, UTC."""
    threads: int
    """CPU threads of torch."""
    copy_gb_s: float
    """10^9 bytes/s that a copy within the device's memory reads and writes together."""
    products: tuple[MatrixProduct, ...]

    def best(self) -> dict[str, MatrixProduct]:
        """Return the product with the most FLOP/s of each precision."""
        names = dict.fromkeys(product.precision for product in self.products)
        return {
            name: max((product for product in self.products if product.precision == name), key=_compute_speed)
            for name in names
        }

    def to_json(self) -> str:
        return json.dumps({"version": RESULT_VERSION, **asdict(self)}, indent=1)


def _compute_speed(product: MatrixProduct) -> float:
    return product.tflops


def read_gemm_result(path: Path) -> GemmResult:
    """Read a file of `bench gemm --out`. Raises UserError for any other file."""
    try:
        content = json.loads(path.read_text())
        if content.pop("version") != RESULT_VERSION:
            raise UserError(f"{path}: written by another version; run `hpc-train bench gemm` again")
        products = tuple(MatrixProduct(**row) for row in content.pop("products"))
        result = GemmResult(**content, products=products)
        if not products or not all(product.seconds > 0 for product in products) or not result.copy_gb_s > 0:
            raise ValueError
        return result
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not products as `hpc-train bench gemm --out` writes them") from None


def list_product_shapes(smallest: int, largest: int) -> Sequence[tuple[int, int, int]]:
    """List shapes (m, n, k): cubes of rising powers of two, and the products of a transformer layer of that width.

    The latter are 2,048 tokens times the attention's output matrix and both feed-forward matrices, four times as wide.
    """
    shapes = []
    size = smallest
    while size <= largest:
        shapes.append((size, size, size))
        shapes += [(2048, size, size), (2048, 4 * size, size), (2048, size, 4 * size)]
        size *= 2
    return list(dict.fromkeys(shapes))
