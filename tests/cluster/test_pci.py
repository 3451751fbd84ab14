"""How far two PCI devices are apart."""

from __future__ import annotations

import pytest

from hpc_train.cluster.sysfs import classify_pci_distance, get_pci_address, normalise_pci_address, parse_pci_path

ROOT = ("pci0000:00", "0000:00:01.0")
SWITCH = (*ROOT, "0000:01:00.0")
DEEPER = (*SWITCH, "0000:02:08.0", "0000:03:00.0")


@pytest.mark.parametrize(
    ("a", "b", "numa", "expected"),
    [
        ((*SWITCH, "0000:02:00.0", "0000:04:00.0"), (*SWITCH, "0000:02:01.0", "0000:05:00.0"), (0, 0), "PIX"),
        ((*ROOT, "0000:01:00.0"), (*ROOT, "0000:01:00.1"), (0, 0), "PIX"),
        ((*SWITCH, "0000:02:00.0", "0000:04:00.0"), (*DEEPER, "0000:06:00.0", "0000:07:00.0"), (0, 0), "PXB"),
        ((*SWITCH, "0000:02:00.0", "0000:04:00.0"), ("pci0000:00", "0000:00:02.0", "0000:09:00.0"), (0, 0), "PHB"),
        (("pci0000:00", "0000:00:03.0"), ("pci0000:00", "0000:00:04.0"), (None, None), "PHB"),
        ((*ROOT, "0000:01:00.0"), ("pci0000:80", "0000:80:01.0", "0000:81:00.0"), (0, 0), "NODE"),
        ((*ROOT, "0000:01:00.0"), ("pci0000:80", "0000:80:01.0", "0000:81:00.0"), (0, 1), "SYS"),
        ((*ROOT, "0000:01:00.0"), ("pci0000:80", "0000:80:01.0", "0000:81:00.0"), (None, None), "SYS"),
        (("pci0001:00", "0001:00:00.0", "0001:01:00.0"), ("pci0000:00", "0000:00:00.0"), (1, 1), "NODE"),
    ],
)
def test_closeness(a: tuple[str, ...], b: tuple[str, ...], numa: tuple[int | None, int | None], expected: str) -> None:
    assert classify_pci_distance(a, b, *numa) == expected
    assert classify_pci_distance(b, a, *reversed(numa)) == expected


def test_paths_of_sysfs() -> None:
    parts = ["", "sys", "devices", "pci0000:00", "0000:00:03.0", "virtio2", "net", "eth0"]
    assert parse_pci_path(parts) == ("pci0000:00", "0000:00:03.0")
    assert get_pci_address(parse_pci_path(parts)) == "0000:00:03.0"
    assert parse_pci_path(["", "sys", "devices", "virtual", "net", "lo"]) == ()
    assert get_pci_address(()) is None
    assert parse_pci_path(["pci10000:e0", "10000:e0:00.0"]) == ("pci10000:e0", "10000:e0:00.0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:07:00.0", "0000:07:00.0"),
        ("0000:0A:1F.7", "0000:0a:1f.7"),
        ("0009:01:00.0", "0009:01:00.0"),
        ("00010000:e1:00.0", "10000:e1:00.0"),
        ("07:00.0", "0000:07:00.0"),
        ("GPU-1", None),
        ("", None),
    ],
)
def test_addresses(text: str, expected: str | None) -> None:
    assert normalise_pci_address(text) == expected
