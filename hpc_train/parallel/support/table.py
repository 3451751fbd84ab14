"""The one table of what can be done: each technique, what does it, and whether its numbers are one device's."""

from __future__ import annotations

from dataclasses import dataclass

EXACT = "equal to one device"


@dataclass(frozen=True)
class Technique:
    """One line of the table; README.md shows it."""

    name: str
    option: str
    """The override that turns it on."""
    backend: str
    """What does the work."""
    numbers: str
    """`equal to one device` (design law 1), or why not."""
    needs: str
    """What it must have, or does not go with; empty: nothing."""
    proof: str
    """The test that shows it."""


TABLE: tuple[Technique, ...] = (
    Technique(
        "data parallel",
        "parallel=ddp",
        "torch DistributedDataParallel; fully_shard over one rank where tp or pp > 1",
        EXACT,
        "",
        "tests/parallel/test_parity.py",
    ),
    Technique("sharded data parallel (ZeRO-3, FSDP2)", "parallel=fsdp", "torch fully_shard", EXACT, "", "the same"),
    Technique(
        "hybrid sharded data parallel (HSDP)",
        "parallel=hsdp",
        "torch fully_shard on dp_replicate x dp_shard",
        EXACT,
        "",
        "the same",
    ),
)
"""Every technique that exists."""
