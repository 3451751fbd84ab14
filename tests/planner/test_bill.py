"""Money, GPU hours and energy."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.run import EnergyConfig, PlanConfig, StorageConfig
from hpc_train.planner.reliability.projection import Prices, compute_bill, find_cheapest, find_fastest


def test_no_price_is_made_up() -> None:
    assert all(getattr(Prices.from_config(PlanConfig()), item.name) is None for item in fields(Prices))
    told = compute_bill(1024, 86400.0, Prices())
    assert told.gpu_hours == 1024 * 24
    assert (told.money, told.compute, told.storage, told.electricity, told.kwh, told.co2_kg) == (None,) * 6


def test_prices_are_those_of_the_config() -> None:
    plan = PlanConfig(
        price_per_gpu_hour=2.0,
        spot_price_per_gpu_hour=0.8,
        energy=EnergyConfig(700.0, 1.1, 0.2, 300.0),
        storage=StorageConfig(None, 20.0),
    )
    assert Prices.from_config(plan) == Prices(2.0, 700.0, 1.1, 0.2, 300.0, 20.0)
    assert Prices.from_config(plan, spot=True).gpu_hour == 0.8


def test_a_bill_by_hand() -> None:
    month = 365.25 / 12 * 86400
    told = compute_bill(100, month, Prices(2.0, 500.0, 1.2, 0.1, 400.0, 20.0), stored_bytes=3 * 2**40, idle_gpus=8)
    hours = month / 3600
    assert told.gpu_hours == pytest.approx(108 * hours)
    assert told.compute == pytest.approx(216 * hours)
    assert told.storage == pytest.approx(60)
    assert told.kwh == pytest.approx(100 * 0.5 * 1.2 * hours)
    assert told.electricity == pytest.approx(6 * hours)
    assert told.co2_kg == pytest.approx(60 * hours * 0.4)
    assert told.money == pytest.approx(216 * hours + 60 + 6 * hours)


@pytest.mark.parametrize(
    ("gpu_hours", "price", "published"),
    [(2_664_000, 2.0, 5.328e6), (440 * 24 * 9.5, 2.0, 200_000)],
    ids=["DeepSeek-V3 (arXiv:2412.19437, table 1)", "MPT-7B: 440 A100 for 9.5 days"],
)
def test_published_costs_are_hours_times_a_rate(gpu_hours: float, price: float, published: float) -> None:
    told = compute_bill(1, gpu_hours * 3600, Prices(gpu_hour=price))
    assert told.money == pytest.approx(published, rel=0.01)


def test_gpt_3s_energy_is_its_draw_times_its_time() -> None:
    """Patterson et al. 2021 (arXiv:2104.10350), table 4: 10,000 V100, 14.8 days, 330 W, PUE 1.10, 1,287 MWh."""
    told = compute_bill(10_000, 14.8 * 86400, Prices(watts_per_gpu=330, pue=1.10))
    assert told.kwh == pytest.approx(1_287_000, rel=0.01)


offers = st.lists(st.tuples(st.floats(0.1, 100), st.floats(1, 1e6)), max_size=20)


@given(offers, st.floats(0.1, 100))
def test_the_cheapest_in_time_is_in_time_and_nothing_in_time_is_cheaper(
    told: list[tuple[float, float]], deadline: float
) -> None:
    days, money = np.array([it[0] for it in told]), np.array([it[1] for it in told])
    best = find_cheapest(days, money, deadline)
    if best is None:
        assert not (days <= deadline).any()
    else:
        assert days[best] <= deadline
        assert money[best] == money[days <= deadline].min()


def test_limits_that_nothing_meets_and_ties() -> None:
    assert find_cheapest([3, 2, 2], [10, 10, 10]) == 1
    assert find_cheapest([3, 2], [10, 20], deadline_days=1) is None
    assert find_fastest([3, 2, 1], [10, 20, 90], budget=30) == 1
    assert find_fastest([3, 2, 1], [10, 20, 90], budget=5) is None
    assert find_fastest([2, 2], [9, 8]) == 1
