"""Matrix products and a copy on the device at hand, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch

from hpc_train.bench.gemm.result import Product, Result
from hpc_train.errors import UserError

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COPY_BYTES = 1 << 28
_ROUND_SECONDS = 0.05
"""As many calls as take about so long are one round."""
_MOST_CALLS = 1000


def measure(precisions: Sequence[str], sizes: Sequence[tuple[int, int, int]], rounds: int) -> Result:
    """Every product in every precision. Raises UserError for a precision that the device cannot multiply in."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    products = [_product(precision, *size, device, rounds) for precision in precisions for size in sizes]
    return Result(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads(),
        copy_gb_s=_copy(device, rounds),
        products=tuple(products),
    )


def _product(precision: str, m: int, n: int, k: int, device: torch.device, rounds: int) -> Product:
    dtype = DTYPES[precision]
    try:
        a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
        out = torch.empty(m, n, dtype=dtype, device=device)
        seconds = _seconds(lambda: torch.mm(a, b, out=out), device, rounds)
    except RuntimeError as error:
        raise UserError(f"bench gemm: {precision} [{m}, {k}] x [{k}, {n}]: {str(error).splitlines()[0]}") from None
    return Product(precision, m, n, k, seconds)


def _copy(device: torch.device, rounds: int) -> float:
    """10^9 bytes/s, read and written."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e-9 * _COPY_BYTES / _seconds(lambda: target.copy_(source), device, rounds)


def _seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of one call: median over rounds of the mean of a round."""
    work()
    one = _timed(work, 1, device)
    calls = min(_MOST_CALLS, max(1, round(_ROUND_SECONDS / max(one, 1e-9))))
    return statistics.median(_timed(work, calls, device) / calls for _ in range(rounds))


def _timed(work: Callable[[], object], calls: int, device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
