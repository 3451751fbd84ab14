"""`hpc-train bench loss`: compare time and memory of output layer and loss in chunks of tokens and all at once.

Both sides run forward and backward over the same hidden states in interleaved rounds. Memory is what torch's operators
have allocated at the worst moment, beyond hidden states and weight; kernels' own scratch memory is not seen. `--count`
counts without computing, so that shapes of any size can be asked about.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train._torch.rehearsal import tensors_in
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.models.layers import cross_entropy_sum
from hpc_train.parallel.chunked_loss import ChunkedLoss, LossChunks
from hpc_train.planner.rehearsal.memory_ledger import MemoryLedger
from hpc_train.timing import interleave_rounds, time_calls
from hpc_train.units import format_seconds

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = ("full", "chunked")


@dataclass(frozen=True)
class LossBenchOptions:
    """Options of `bench loss`."""

    tokens: int
    hidden: int
    vocabulary: int
    chunk: int
    precision: str
    rounds: int
    count: bool
    """Count memory only, without computing."""

    def check(self) -> None:
        """Raise UserError for sizes that cannot be measured."""
        for name in ("tokens", "hidden", "vocabulary", "chunk", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class LossBenchResult:
    """The measurements of each of SIDES."""

    device: str
    seconds: dict[str, float] | None
    """Seconds of forward and backward, median over rounds; None if only memory was counted."""
    peak_bytes: dict[str, int]
    chunk_bytes: int
    """Bytes of one chunk's logits in float32 (float64 in fp64)."""
    speed: float | None
    """Full over chunked seconds, median of the rounds' ratios; above 1: chunks are faster."""
    memory: float
    """Chunked over full bytes."""


def run_loss_command(options: LossBenchOptions, as_json: bool) -> int:
    """Measure and print. Raises UserError as LossBenchOptions.check."""
    options.check()
    result = measure_loss(options)
    if as_json:
        print(json.dumps({**asdict(options), **asdict(result)}, indent=1))
    else:
        _print_result(result, options)
    return EXIT_DONE


def measure_loss(options: LossBenchOptions) -> LossBenchResult:
    """Measure both sides on the GPU here if there is one, else on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() and not options.count else "cpu")
    mode: AbstractContextManager[object] = FakeTensorMode() if options.count else nullcontext()
    with mode:
        sides = _make_sides(options, device)
        peaks = {name: _count_peak(side) for name, side in sides.items()}
        seconds = None if options.count else _time_sides(sides, options.rounds, device)
    itemsize = max(DTYPES[options.precision].itemsize, 4)
    return LossBenchResult(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        seconds=None if seconds is None else {name: statistics.median(times) for name, times in seconds.items()},
        peak_bytes=peaks,
        chunk_bytes=min(options.chunk, options.tokens) * options.vocabulary * itemsize,
        speed=None if seconds is None else statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)),
        memory=peaks["chunked"] / peaks["full"],
    )


def _make_sides(options: LossBenchOptions, device: torch.device) -> dict[str, Callable[[], None]]:
    """Make forward and backward of each side, over the same tensors."""
    dtype = DTYPES[options.precision]
    head = nn.Linear(options.hidden, options.vocabulary, bias=False, device=device, dtype=dtype)
    x = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(options.vocabulary, (options.tokens,), device=device)
    chunked = ChunkedLoss(head, LossChunks(options.chunk, options.vocabulary))

    def run(compute: Callable[[], Tensor]) -> None:
        x.grad = head.weight.grad = None
        (compute() / options.tokens).backward()  # type: ignore[no-untyped-call]

    return {
        "full": lambda: run(lambda: cross_entropy_sum(F.linear(x, head.weight), target)),
        "chunked": lambda: run(lambda: chunked(x, target)),
    }


class CountMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a ledger every result of an operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = MemoryLedger()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ledger.record(out, list(tensors_in((args, kwargs))))
        return out


def _count_peak(side: Callable[[], None]) -> int:
    with CountMemory() as counted:
        side()
    peak: int = counted.ledger.worst().total
    return peak


def _time_sides(sides: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each side in each round; the sides have run once before."""
    seconds: dict[str, list[float]] = {name: [0.0] * rounds for name in sides}
    names = list(sides)
    for number, index in interleave_rounds(rounds, len(names)):
        seconds[names[index]][number] = time_calls(sides[names[index]], 1, device)
    return seconds


def _print_result(result: LossBenchResult, options: LossBenchOptions) -> None:
    shape = f"{options.tokens} tokens x {options.hidden} -> {options.vocabulary} words, {options.precision}"
    table = Table(title=f"{shape}, on {result.device}", title_justify="left")
    for column in ("loss", "forward and backward", "memory, MiB"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for name, title in zip(SIDES, ("all at once", f"{options.chunk} tokens at a time"), strict=True):
        seconds = "-" if result.seconds is None else format_seconds(result.seconds[name])
        table.add_row(title, seconds, f"{result.peak_bytes[name] / 2**20:.0f}")
    console = Console()
    console.print(table)
    speed = "" if result.speed is None else f"speed {result.speed:.2f} of all at once, "
    console.print(f"{speed}memory {result.memory:.2f}; the logits of a chunk {result.chunk_bytes / 2**20:.0f} MiB")
