"""Numbers with their units, as tables and messages print them."""

from __future__ import annotations

import pytest

from hpc_train.units import (
    GIB,
    MIB,
    TIB,
    choose_memory_unit,
    format_age,
    format_amount,
    format_bytes,
    format_exact_bytes,
    format_percent,
    format_seconds,
    format_traffic,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (5 * MIB, "5.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (4 * TIB, "4.00 TiB"),
        (4096 * TIB, "4096.00 TiB"),
    ],
)
def test_sizes_for_people(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


def test_exact_sizes_are_not_rounded() -> None:
    found = [format_exact_bytes(size) for size in (0, 1025, 3 << 10, 16 * MIB, GIB + MIB, 8 * GIB)]
    assert found == ["0 B", "1025 B", "3 KiB", "16 MiB", "1025 MiB", "8 GiB"]


def test_sizes_side_by_side_share_a_unit() -> None:
    assert (choose_memory_unit(GIB), choose_memory_unit(GIB - 1)) == ((GIB, "GiB"), (MIB, "MiB"))


def test_traffic_is_decimal() -> None:
    found = [format_traffic(count) for count in (0, 999, 1e3, 1.25e9, 3e13)]
    assert found == ["0 B", "999 B", "1 kB", "1.25 GB", "30 TB"]


def test_durations() -> None:
    found = [format_seconds(value) for value in (0, 2e-9, 1.5e-5, 0.0123, 4, 99.94, 1234.5)]
    assert found == ["0", "2 ns", "15 µs", "12.3 ms", "4 s", "99.9 s", "1,234 s"]


def test_ages() -> None:
    found = [format_age(seconds) for seconds in (3, 99, 600, 9000, 7 * 86400)]
    assert found == ["3 s", "99 s", "10 min", "2.5 h", "7.0 d"]


def test_amounts_and_shares() -> None:
    assert [format_amount(value) for value in (12, 1250, 2.5e6, -3e9)] == ["12", "1.25k", "2.5M", "-3G"]
    assert (format_percent(0.125), format_percent(None)) == ("12.5%", "-")
