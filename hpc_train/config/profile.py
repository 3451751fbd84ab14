"""`profile` of a run: which steps of which ranks are traced in detail."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field
from hpc_train.errors import UserError

MAX_STEPS = 100
"""A trace of more steps than this fits into no viewer."""


@config_dataclass
class ProfileConfig:
    """Traces of single steps, operator by operator; they cost nothing while no step is traced."""

    steps: str | None = None
    """Steps to trace, FIRST:LAST, counted from 1 as in metrics.jsonl; None: none, unless `hpc-train profile RUN` asks
    for some later."""
    ranks: list[int] = config_field(default=[0])
    """Ranks that write a trace."""
    modules: bool = True
    """Mark where each module of the model begins and ends, for a table of time by module."""
    shapes: bool = False
    """Record the shapes of the operators' inputs, which makes traces larger."""
    stacks: bool = False
    """Record the Python stack of each operator, which makes traces much larger and steps slower."""
    nvtx: bool = False
    """On NVIDIA GPUs, mark the parts of every step and the computations of pipeline stages as NVTX ranges, for Nsight
    Systems around the ranks (launch.wrap)."""
    memory_snapshot: bool = False
    """On GPUs, write a snapshot of the allocator as well, for https://pytorch.org/memory_viz."""
    poll_seconds: float = config_field(default=10.0, ge=0, le=3600)
    """Seconds between the checks of each rank whether `hpc-train profile RUN` asks for a trace; 0: never."""


def parse_steps(text: str, where: str = "profile.steps") -> tuple[int, int]:
    """Parse FIRST:LAST. where: the option, for the UserError that anything else raises."""
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() and len(part) < 13 for part in (first, last)):
        raise UserError(f"{where}={text}: write FIRST:LAST, such as 10:14 (in a YAML file in quotes)")
    bounds = int(first), int(last)
    if not 1 <= bounds[0] <= bounds[1]:
        raise UserError(f"{where}={text}: steps are counted from 1, and the last is not before the first")
    if bounds[1] - bounds[0] >= MAX_STEPS:
        raise UserError(f"{where}={text}: more than {MAX_STEPS} steps are too many for one trace; ask for fewer")
    return bounds


def check_ranks(ranks: list[int], size: int | None = None, where: str = "profile.ranks") -> None:
    """Raise UserError for ranks that no job of `size` ranks has; size: None if it is not known."""
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise UserError(f"{where}={ranks}: list the ranks to trace, from 0 on, each once")
    if size is not None and max(ranks) >= size:
        raise UserError(f"{where}={ranks}: the run has ranks 0 to {size - 1}")
