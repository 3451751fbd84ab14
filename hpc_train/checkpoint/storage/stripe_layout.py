"""Choose how the files of a step are striped over the servers of Lustre, and say a layout in words and for `lfs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config.train import LustreConfig
from hpc_train.units import format_exact_bytes

MIB = 1 << 20
ALL_OSTS = -1
"""Stripe count that means all OSTs."""
MAX_STRIPES = 8
"""Maximum stripes of a file: one node keeps no more servers busy, and each is one more that can fail."""
_PER_OST = 64 << 30
"""Maximum bytes of one file on an OST, as long as there are other OSTs."""
_FILLED = 4
"""Minimum rounds of stripes for a file to be worth striping."""


@dataclass(frozen=True)
class StripeComponent:
    """A byte range of a file, or all of it, and how it is striped."""

    end: int | None = None
    """One past its last byte; None: to the end of the file. It begins where the one before ends."""
    count: int = 1
    """Number of OSTs; ALL_OSTS for all; 0 on the metadata server."""
    size: int | None = None
    """Bytes of a stripe, a multiple of 64 KiB; None: the default of the file system."""
    pool: str | None = None
    on_mdt: bool = False
    """Data on the metadata server (DoM, Lustre 2.11): a small file is read with its inode, in one request."""


StripeLayout = tuple[StripeComponent, ...]
"""One component: a plain layout. Several: a progressive one (PFL, Lustre 2.10)."""


def choose_shard_layout(largest: int, files: int, osts: int | None, wishes: LustreConfig) -> StripeLayout:
    """Choose the layout of a directory of shard files that are written at once, each by one process.

    largest: bytes of the largest file. osts: None if they could not be counted.

    With at least as many files as OSTs each file lies on one, so that files do not wait for each other's locks. Fewer
    files share the OSTs out, but a file gets no more stripes than it fills, nor than MAX_STRIPES. A very large file is
    spread in any case, so that it does not fill up one OST.
    """
    size = wishes.stripe_size_mib * MIB
    if wishes.stripe_count is not None:
        return (StripeComponent(count=wishes.stripe_count, size=size, pool=wishes.pool),)
    # OSTs for each file if the files share all of them out.
    share = max(1, (osts or 1) // max(files, 1))
    filled = max(1, largest // (_FILLED * size))
    at_least = -(-largest // _PER_OST)
    count = max(1, min(share, filled, MAX_STRIPES), min(at_least, osts or MAX_STRIPES))
    return (StripeComponent(count=count, size=size, pool=wishes.pool),)


def list_step_layouts(wishes: LustreConfig) -> list[StripeLayout]:
    """Return layouts for the directory of a step, which has small files: the best first, then for older servers."""
    small = StripeComponent(end=MIB, count=0, on_mdt=True)
    middle = StripeComponent(end=256 * MIB, count=1, size=MIB, pool=wishes.pool)
    rest = StripeComponent(count=4, size=MIB, pool=wishes.pool)
    plain = StripeComponent(count=1, size=MIB, pool=wishes.pool)
    return [(small, middle, rest), (middle, rest), (plain,)] if wishes.progressive else [(plain,)]


def format_setstripe_arguments(layout: StripeLayout) -> list[str]:
    """Return the arguments of `lfs setstripe` without the path."""
    if len(layout) == 1 and layout[0].end is None:
        return _make_component_arguments(layout[0])
    return [
        word
        for component in layout
        for word in ("-E", _format_size_argument(component.end), *_make_component_arguments(component))
    ]


def count_stripe_round_bytes(layout: StripeLayout, osts: int | None) -> int:
    """Return the bytes of one round over all OSTs of a file, in its last component."""
    last = layout[-1]
    count = (osts or 1) if last.count == ALL_OSTS else max(last.count, 1)
    return count * (last.size or MIB)


def describe_stripes(layout: Sequence[StripeComponent]) -> str:
    """Format a layout: `4 x 16 MiB`, or `to 1 MiB: on the MDT, to 256 MiB: 1 x 1 MiB, then: 4 x 1 MiB`."""
    if len(layout) == 1 and layout[0].end is None:
        return _describe_component(layout[0])
    parts = [
        f"to {format_exact_bytes(component.end)}: {_describe_component(component)}"
        if component.end is not None
        else f"then: {_describe_component(component)}"
        for component in layout
    ]
    return ", ".join(parts)


def _make_component_arguments(component: StripeComponent) -> list[str]:
    if component.on_mdt:
        return ["-L", "mdt"]
    size = ["-S", _format_size_argument(component.size)] if component.size is not None else []
    pool = ["-p", component.pool] if component.pool is not None else []
    return ["-c", str(component.count), *size, *pool]


def _format_size_argument(number: int | None) -> str:
    """Format a size with a unit: some releases read small plain numbers as KiB."""
    if number is None:
        return "-1"
    assert number % 1024 == 0, number
    return f"{number // MIB}M" if number % MIB == 0 else f"{number // 1024}K"


def _describe_component(component: StripeComponent) -> str:
    if component.on_mdt:
        return "on the MDT"
    count = "all OSTs" if component.count == ALL_OSTS else str(component.count)
    size = f" x {format_exact_bytes(component.size)}" if component.size is not None else ""
    return f"{count}{size}" + (f" of pool {component.pool}" if component.pool else "")
