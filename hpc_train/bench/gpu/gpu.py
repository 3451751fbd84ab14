"""`hpc-train bench gpu`: run every part on one GPU, each in a process of its own, and write a table.

A part that fails or takes too long loses only its own rows, because each part runs in a new process and gets a fresh
CUDA context. The table is written after each part, so that a job that is killed still leaves one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from hpc_train.bench.gpu.gpu_table import GpuResult, PartResult, Row, format_markdown
from hpc_train.errors import EXIT_DONE, UserError

PARTS = ("waits", "parity", "memory", "llama_1b", "blocks_8b", "offload", "checkpoint", "eager")
"""In the order in which they run: what is quick and what matters most comes first."""
_MIN_SECONDS = 20.0
"""A part starts only if at least this much time is left."""


@dataclass(frozen=True)
class GpuBenchOptions:
    """Options of `bench gpu`."""

    parts: Sequence[str] = PARTS
    device: str = "cuda"
    """cuda or cpu."""
    quick: bool = False
    """Tiny shapes, to try the parts: their figures say nothing."""
    minutes: float = 10.0
    """Time for all parts."""
    out: str = "bench-gpu"
    """Files to write, without .md and .json."""
    json: bool = False
    inside: bool = False
    """Run one part in this process and print its result as JSON."""

    def check(self) -> None:
        """Raise UserError for what cannot be measured here."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "bench gpu: torch sees no GPU here; run it on a node with one (srun --gpus=1 hpc-train bench gpu), or "
                "try its parts with --device cpu --quick"
            )
        if self.device == "cpu" and not self.quick:
            raise UserError("--device cpu: its shapes are those of a GPU; add --quick")
        if self.minutes <= 0:
            raise UserError(f"--minutes {self.minutes:g}: must be more than 0")
        if not self.inside and not Path(self.out).absolute().parent.is_dir():
            raise UserError(f"--out {self.out}: name files in a folder that exists")


def run_gpu_command(options: GpuBenchOptions) -> int:
    """Measure, print the table and write it. Raises UserError as GpuBenchOptions.check."""
    options.check()
    if options.inside:
        from hpc_train.bench.gpu.parts import measure_part

        print(json.dumps(asdict(measure_part(options.parts[0], options.device, options.quick))))
        return EXIT_DONE
    result = run_parts(options, lambda name, seconds: run_in_process(name, options, seconds), write_result)
    print(result.to_json() if options.json else format_markdown(result))
    return EXIT_DONE


def write_result(result: GpuResult, out: str) -> None:
    """Write a result, perhaps of some parts only, to both of its files."""
    Path(f"{out}.json").write_text(result.to_json() + "\n")
    Path(f"{out}.md").write_text(format_markdown(result) + "\n")


def run_parts(
    options: GpuBenchOptions,
    run: Callable[[str, float], PartResult],
    write: Callable[[GpuResult, str], None],
) -> GpuResult:
    """Run the parts one after another until time is up.

    run: runs the part of a name within a number of seconds. write: gets the result so far after each part.
    """
    start, results = time.monotonic(), list[PartResult]()
    for name in options.parts:
        seconds_left = options.minutes * 60 - (time.monotonic() - start)
        if seconds_left < min(_MIN_SECONDS, options.minutes * 60):
            results.append(PartResult(name, 0.0, failed=f"not begun: the {options.minutes:g} minutes are up"))
        else:
            print(f"bench gpu: {name}", file=sys.stderr, flush=True)
            results.append(run(name, seconds_left))
        result = GpuResult(describe_device(options.device), describe_software(), _now(), options.quick, tuple(results))
        write(result, options.out)
    return result


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_in_process(name: str, options: GpuBenchOptions, seconds: float) -> PartResult:
    """Run a part in a process of its own. An error there does not raise: the result says why the part failed."""
    words = ["bench", "gpu", "--part", name, "--device", options.device, "--inside"]
    command = [sys.executable, "-m", "hpc_train", *words, *(["--quick"] if options.quick else [])]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return PartResult(name, time.monotonic() - start, failed=f"killed after {seconds:.0f} s: its time was up")
    return parse_part_output(name, done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def parse_part_output(name: str, code: int, out: str, error: str, seconds: float) -> PartResult:
    """Make the result of a part from what its process printed."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if code == EXIT_DONE:
        try:
            content = json.loads(out.splitlines()[-1])
            return PartResult(name, seconds, tuple(Row(**row) for row in content["rows"]), content["failed"])
        except (ValueError, IndexError, KeyError, TypeError):
            lines.append("printed no result")
    ending = f"signal {-code}" if code < 0 else f"exit code {code}"
    return PartResult(name, seconds, failed=f"{lines[-1] if lines else 'said nothing'} ({ending})")


def describe_device(device: str) -> str:
    """Return the name of the device, with the memory of a GPU or the threads of a CPU."""
    import torch

    if device == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def describe_software() -> str:
    """Return the versions that the figures depend on."""
    import torch

    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return f"torch {torch.__version__}{cuda}, Python {sys.version.split()[0]}"
