"""Layouts of files on Lustre: over how many OSTs, in stripes of which size, from which pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config.train import LustreConfig

MIB = 1 << 20
UNIT = 64 << 10
"""A stripe size is a multiple of it."""
LARGEST = (1 << 32) - UNIT
"""Of a stripe, in bytes."""
ALL = -1
"""As a stripe count: every OST."""
MOST = 8
"""Stripes that the policy gives a file: more servers than one node keeps busy gain nothing, and each is one more to
fail."""
_PER_OST = 64 << 30
"""Bytes of one file that an OST is given, as long as there are others."""
_FILLED = 4
"""Rounds of stripes that a file must have to be worth striping."""


@dataclass(frozen=True)
class Component:
    """A stretch of a file, or all of it, and how it is striped."""

    end: int | None = None
    """One past its last byte; None: to the end of the file. It begins where the one before ends."""
    count: int = 1
    """OSTs; ALL for every one; 0 on the metadata server."""
    size: int | None = None
    """Bytes of a stripe, a multiple of UNIT; None: as the file system has it."""
    pool: str | None = None
    on_mdt: bool = False
    """Data on the metadata server (DoM, Lustre 2.11): a small file is there with its inode, in one request."""


Layout = tuple[Component, ...]
"""One component: a plain layout. Several: a progressive one (PFL, Lustre 2.10)."""


def shard_layout(largest: int, files: int, osts: int | None, wishes: LustreConfig) -> Layout:
    """For a directory of shard files, all written at once, each by one process.

    largest: bytes of the largest file. osts: None where they could not be counted.

    With at least as many files as OSTs every file lies on one, and none waits for another's locks. Fewer files share
    the OSTs out, but a file gets no more than it fills, nor than MOST. A very large one is spread in any case, lest it
    fill one OST up.
    """
    size = wishes.stripe_size_mib * MIB
    if wishes.stripe_count is not None:
        return (Component(count=wishes.stripe_count, size=size, pool=wishes.pool),)
    share = max(1, (osts or 1) // max(files, 1))
    filled = max(1, largest // (_FILLED * size))
    at_least = -(-largest // _PER_OST)
    count = max(1, min(share, filled, MOST), min(at_least, osts or MOST))
    return (Component(count=count, size=size, pool=wishes.pool),)


def step_layouts(wishes: LustreConfig) -> list[Layout]:
    """For the directory of a step, where small files and perhaps an index lie: the best first, then what older servers
    take instead."""
    small = Component(end=MIB, count=0, on_mdt=True)
    middle = Component(end=256 * MIB, count=1, size=MIB, pool=wishes.pool)
    rest = Component(count=4, size=MIB, pool=wishes.pool)
    plain = Component(count=1, size=MIB, pool=wishes.pool)
    return [(small, middle, rest), (middle, rest), (plain,)] if wishes.progressive else [(plain,)]


def setstripe_arguments(layout: Layout) -> list[str]:
    """What `lfs setstripe` is told, without the path."""
    if len(layout) == 1 and layout[0].end is None:
        return _component_arguments(layout[0])
    return [word for it in layout for word in ("-E", _bytes(it.end), *_component_arguments(it))]


def round_bytes(layout: Layout, osts: int | None) -> int:
    """Bytes after which a file comes back to its first OST, in its last component."""
    last = layout[-1]
    count = (osts or 1) if last.count == ALL else max(last.count, 1)
    return count * (last.size or MIB)


def in_words(layout: Sequence[Component]) -> str:
    """`4 x 16 MiB`, or `to 1 MiB: on the MDT, to 256 MiB: 1 x 1 MiB, then: 4 x 1 MiB`."""
    if len(layout) == 1 and layout[0].end is None:
        return _stripes(layout[0])
    parts = [f"to {_human(it.end)}: {_stripes(it)}" if it.end is not None else f"then: {_stripes(it)}" for it in layout]
    return ", ".join(parts)


def _component_arguments(it: Component) -> list[str]:
    if it.on_mdt:
        return ["-L", "mdt"]
    size = ["-S", _bytes(it.size)] if it.size is not None else []
    pool = ["-p", it.pool] if it.pool is not None else []
    return ["-c", str(it.count), *size, *pool]


def _bytes(number: int | None) -> str:
    """In a form that no release takes for KiB, as some do with small plain numbers."""
    if number is None:
        return "-1"
    assert number % 1024 == 0, number
    return f"{number // MIB}M" if number % MIB == 0 else f"{number // 1024}K"


def _stripes(it: Component) -> str:
    if it.on_mdt:
        return "on the MDT"
    count = "all OSTs" if it.count == ALL else str(it.count)
    size = f" x {_human(it.size)}" if it.size is not None else ""
    return f"{count}{size}" + (f" of pool {it.pool}" if it.pool else "")


def _human(number: int | None) -> str:
    if number is None:
        return "the end"
    unit, name = next((u, n) for u, n in ((1 << 30, "GiB"), (MIB, "MiB"), (1024, "KiB"), (1, "B")) if number % u == 0)
    return f"{number // unit} {name}"
