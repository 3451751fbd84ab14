"""Numbers with units, for tables, pictures and log lines (a leaf): the one place that formats them."""

from __future__ import annotations

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_seconds(value: float) -> str:
    """With three digits and a unit."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_duration(value: float) -> str:
    """Format seconds with three digits, from ns to s: 12.3 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "0" if value == 0 else f"{value * 1e9:.3g} ns"


def format_amount(value: float) -> str:
    """With three digits and k, M or G."""
    for size, unit in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def format_percent(value: float | None) -> str:
    """In per cent; - where it is not known."""
    return "-" if value is None else f"{value:.1%}"
