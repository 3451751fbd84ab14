"""Time matrix products and a copy on the device at hand, and show the result as a table or a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hpc_train.bench.gemm import GemmResult, MatrixProduct
from hpc_train.errors import UserError
from hpc_train.parallel.precision.number_formats import DTYPES
from hpc_train.timing import time_calls

_COPY_BYTES = 1 << 28
_ROUND_SECONDS = 0.05
"""A round repeats the call for about this long."""
_MAX_CALLS = 1000


def measure_device(precisions: Sequence[str], sizes: Sequence[tuple[int, int, int]], rounds: int) -> GemmResult:
    """Time every product in every precision. Raises UserError for a precision that the device does not support."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    products = [_measure_product(precision, *size, device, rounds) for precision in precisions for size in sizes]
    return GemmResult(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads(),
        copy_gb_s=_measure_copy(device, rounds),
        products=tuple(products),
    )


def _measure_product(precision: str, m: int, n: int, k: int, device: torch.device, rounds: int) -> MatrixProduct:
    dtype = DTYPES[precision]
    try:
        a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
        out = torch.empty(m, n, dtype=dtype, device=device)
        seconds = _median_seconds(lambda: torch.mm(a, b, out=out), device, rounds)
    except RuntimeError as error:
        raise UserError(f"bench gemm: {precision} [{m}, {k}] x [{k}, {n}]: {str(error).splitlines()[0]}") from None
    return MatrixProduct(precision, m, n, k, seconds)


def _measure_copy(device: torch.device, rounds: int) -> float:
    """Return the copy bandwidth in 10^9 bytes/s; every byte counts twice, as it is read and written."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e-9 * _COPY_BYTES / _median_seconds(lambda: target.copy_(source), device, rounds)


def _median_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return seconds of one call: the median over rounds of the mean of a round."""
    work()  # the first call allocates and chooses a kernel
    once = time_calls(work, 1, device)
    calls = min(_MAX_CALLS, max(1, round(_ROUND_SECONDS / max(once, 1e-9))))
    return statistics.median(time_calls(work, calls, device) for _ in range(rounds))


def print_gemm_result(result: GemmResult) -> None:
    """Print a table of all products, with the fastest of each precision marked."""
    best = set(result.best().values())
    table = Table("precision", "m", "n", "k", "ms", "TFLOP/s", title=_format_title(result), title_justify="left")
    for product in result.products:
        mark = " best" if product in best else ""
        sizes = (str(size) for size in (product.m, product.n, product.k))
        table.add_row(product.precision, *sizes, f"{product.seconds * 1e3:.4g}", f"{product.tflops:.4g}{mark}")
    Console(width=None if Console().is_terminal else 120).print(table, highlight=False)


def _format_title(result: GemmResult) -> str:
    threads = f", {result.threads} threads" if result.device == "cpu" else ""
    return f"{result.device}{threads}: a copy moves {result.copy_gb_s:.4g} GB/s, read and written"


def plot_gemm_result(result: GemmResult, path: Path) -> None:
    """Plot TFLOP/s against FLOPs, one line for each precision, as .png or .svg."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for precision in result.best():
        rows = sorted((row for row in result.products if row.precision == precision), key=_count_flops)
        axes.plot([_count_flops(row) for row in rows], [row.tflops for row in rows], "o-", label=precision)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs of the product", ylabel="TFLOP/s", title=_format_title(result))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _count_flops(product: MatrixProduct) -> float:
    return 2.0 * product.m * product.n * product.k
