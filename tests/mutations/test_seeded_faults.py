"""The list of seeded faults fits the code. Whether tests notice them is a study of its own: `make mutations`."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_mutations import check_fits
from seeded_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file(fault: Fault) -> None:
    check_fits(fault, ROOT)


def test_no_two_have_a_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
