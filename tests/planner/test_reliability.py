"""Failure rates: the published ones, and how a site's own counts replace them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaincinv

from hpc_train.planner.reliability.failure_rate import (
    DAY,
    PUBLISHED_RATES,
    FailureHistory,
    FailureRate,
    Percentiles,
    make_prior_failure_rate,
)


def test_the_published_rates_are_those_of_their_papers() -> None:
    rates = {it.site: it.per_1000_node_days for it in PUBLISHED_RATES}
    assert rates["Meta, Llama 3"] == pytest.approx(3.8, abs=0.05)
    assert (rates["Meta, RSC-1"], rates["Meta, RSC-2"]) == (6.50, 2.34)
    assert all("arXiv:" in it.source for it in PUBLISHED_RATES)


@pytest.mark.parametrize("shape", [1.0, 1.5, 3.97, 10.0, 100.0, 1e4, 1e6])
def test_quantiles_are_those_of_scipy(shape: float) -> None:
    for p in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert FailureRate(shape, 2.0).quantile(p) == pytest.approx(gammaincinv(shape, p) / 2, rel=1e-10), p


def test_the_prior_has_the_mean_and_the_spread_of_the_published_sites() -> None:
    rate = make_prior_failure_rate()
    rates = [it.per_1000_node_days / 1000 for it in PUBLISHED_RATES]
    assert rate.mean == pytest.approx(np.mean(rates))
    assert rate.shape / rate.node_days**2 == pytest.approx(np.var(rates, ddof=1))
    assert rate.percentiles.p10 < 0.0038 < 0.0065 < rate.percentiles.p90
    assert 800 < rate.node_days < 1100


def test_the_prior_gives_the_published_times_to_interruption() -> None:
    """Llama 3: one unexpected interruption in 3.1 hours; RSC-1: 1.8 hours projected for 16,384 GPUs."""
    hours = make_prior_failure_rate().interruption_seconds(2048)
    assert hours.p10 / 3600 < 1.8 < 3.1 < hours.p90 / 3600


@given(st.integers(0, 1000), st.floats(1, 1e6))
def test_own_counts_move_the_mean_towards_them(failures: int, node_days: float) -> None:
    before, own = make_prior_failure_rate(), failures / node_days
    after = before.after(FailureHistory(failures, node_days))
    low, high = sorted((before.mean, own))
    assert low * (1 - 1e-9) <= after.mean <= high * (1 + 1e-9)


def test_many_own_counts_leave_nothing_of_the_prior() -> None:
    rate = make_prior_failure_rate().after(FailureHistory(20_000, 1e6))
    assert rate.mean == pytest.approx(0.02, rel=0.01)
    assert rate.percentiles.p90 / rate.percentiles.p10 < 1.05


def test_histories_add_up() -> None:
    once = make_prior_failure_rate().after(FailureHistory(3, 400) + FailureHistory(5, 600))
    assert once == make_prior_failure_rate().after(FailureHistory(3, 400)).after(FailureHistory(5, 600))


def test_the_band_holds_80_percent_of_the_draws() -> None:
    rate = FailureRate(3.0, 500.0)
    draws = np.random.default_rng(0).gamma(rate.shape, 1 / rate.node_days, 50_000)
    assert np.mean((draws > rate.percentiles.p10) & (draws < rate.percentiles.p90)) == pytest.approx(0.8, abs=0.01)


def test_failures_of_a_run_are_as_uncertain_as_rate_and_chance_together() -> None:
    rate, random = make_prior_failure_rate(), np.random.default_rng(1)
    draws = random.poisson(random.gamma(rate.shape, 1 / rate.node_days, 100_000) * 128 * 30)
    told = rate.failures(128, 30)
    assert [told.p10, told.p50, told.p90] == pytest.approx(np.percentile(draws, [10, 50, 90]), abs=1)


def test_a_rate_of_the_user_keeps_the_spread_in_proportion() -> None:
    told = make_prior_failure_rate().scaled_to(0.010)
    assert told.mean == pytest.approx(0.010)
    assert told.percentiles.p90 / told.percentiles.p10 == pytest.approx(
        make_prior_failure_rate().percentiles.p90 / make_prior_failure_rate().percentiles.p10
    )


def test_a_job_of_twice_the_nodes_is_interrupted_twice_as_often() -> None:
    one, two = make_prior_failure_rate().interruption_seconds(64), make_prior_failure_rate().interruption_seconds(128)
    assert (one.p10, one.p50, one.p90) == pytest.approx((2 * two.p10, 2 * two.p50, 2 * two.p90))
    assert one.p50 == pytest.approx(DAY / (make_prior_failure_rate().percentiles.p50 * 64))


bands = st.tuples(st.floats(0.1, 10), st.floats(1, 3), st.floats(1, 3)).map(
    lambda it: Percentiles(it[0] / it[1], it[0], it[0] * it[2])
)


@given(bands, bands)
def test_the_product_of_bands_is_wider_than_each_and_not_as_wide_as_both(one: Percentiles, other: Percentiles) -> None:
    both = one.times(other)
    assert both.p50 == pytest.approx(one.p50 * other.p50)
    assert one.p10 * other.p10 <= both.p10 * (1 + 1e-9)
    assert both.p90 <= one.p90 * other.p90 * (1 + 1e-9)
    assert both.p90 / both.p50 >= max(one.p90 / one.p50, other.p90 / other.p50) * (1 - 1e-9)


def test_a_band_goes_through_a_falling_function_in_order() -> None:
    assert Percentiles(1, 2, 4).through(lambda it: 1 / it) == Percentiles(0.25, 0.5, 1)
