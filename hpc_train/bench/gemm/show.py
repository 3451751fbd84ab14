"""Products as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpc_train.bench.gemm.result import Result


def show(result: Result) -> None:
    """Print every product, the best of each precision marked."""
    best = set(result.best().values())
    table = Table("precision", "m", "n", "k", "ms", "TFLOP/s", title=_title(result), title_justify="left")
    for it in result.products:
        mark = " best" if it in best else ""
        sizes = (str(size) for size in (it.m, it.n, it.k))
        table.add_row(it.precision, *sizes, f"{it.seconds * 1e3:.4g}", f"{it.tflops:.4g}{mark}")
    Console(width=None if Console().is_terminal else 120).print(table, highlight=False)


def _title(result: Result) -> str:
    threads = f", {result.threads} threads" if result.device == "cpu" else ""
    return f"{result.device}{threads}: a copy moves {result.copy_gb_s:.4g} GB/s, read and written"


def write_plot(result: Result, path: Path) -> None:
    """TFLOP/s against FLOPs, a line a precision; .png or .svg by the name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for precision in result.best():
        rows = sorted((it for it in result.products if it.precision == precision), key=lambda it: it.m * it.n * it.k)
        axes.plot([2.0 * it.m * it.n * it.k for it in rows], [it.tflops for it in rows], "o-", label=precision)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs of the product", ylabel="TFLOP/s", title=_title(result))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
