"""Format bytes, times, amounts and lists for tables, pictures, log lines and error messages.

Memory and files are in binary units (1 GiB = 2**30 bytes), as allocators and file systems count them; network traffic
is in decimal units (1 GB = 1e9 bytes), as link speeds are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
"""Bytes."""
_BINARY = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES_OF_SUFFIX = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
"""Bytes of the unit that a letter behind a number stands for, as in `64M`."""
_AMOUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_bytes(size: float | None) -> str:
    """Format a size in memory or on a disk: `1.50 GiB`, `12 B`; `-` if it is unknown.

    The size is rounded, so two sizes that differ may look alike; `format_exact_bytes` does not round.
    """
    if size is None:
        return "-"
    for unit, name in _BINARY:
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"


def format_exact_bytes(size: int) -> str:
    """Format a size without rounding, in the largest unit that divides it: `16 MiB`, `1025 B`."""
    for unit, name in _BINARY:
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def choose_memory_unit(largest: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit, GiB or MiB, for a group of sizes that are compared."""
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


def format_traffic(count: float) -> str:
    """Format bytes that cross a network: `1.25 GB`."""
    for unit, name in _DECIMAL:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def format_seconds(value: float) -> str:
    """Format a duration with three digits: `1,234 s`, `12.3 ms`, `15 µs`."""
    if value >= 100:
        return f"{value:,.0f} s"
    for unit, name in _SECONDS:
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return "0" if value == 0 else f"{value * 1e9:.3g} ns"


def format_age(seconds: float) -> str:
    """Format the time since an event: `12 s`, `5 min`, `2.5 h`, `3.1 d`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def format_amount(value: float) -> str:
    """Format a count with three digits and k, M or G: `1.25M`."""
    for unit, name in _AMOUNTS:
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def format_percent(value: float | None) -> str:
    """Format a fraction of 1 as per cent: `12.5%`; `-` if it is unknown."""
    return "-" if value is None else f"{value:.1%}"


def format_ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """Format whole numbers in rising order as ranges: `0-3,8`. most: ranges to list; the others become `...`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:most])
    return f"{shown},..." if most is not None and len(ranges) > most else shown


def join_first(items: Sequence[object], most: int = 4, separator: str = ", ") -> str:
    """Join the first few items of a list, and count the rest: `a, b and 3 more`."""
    shown = separator.join(map(str, items[:most]))
    return f"{shown}{separator.rstrip(', ')} and {len(items) - most} more" if len(items) > most else shown
