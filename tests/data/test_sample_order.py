"""The order of samples: every sample once an epoch, whatever the number of ranks and however often it changes."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.sample_order import order_samples

SEEDS = st.integers(0, (1 << 63) - 1)


@given(SEEDS, st.integers(1, 3000), st.integers(0, 1 << 40))
def test_every_epoch_is_a_permutation(seed, n, epoch):
    assert np.array_equal(np.sort(order_samples(seed, n, epoch * n, n)), np.arange(n))


@given(SEEDS, st.integers(1, 1 << 50), st.integers(0, 1 << 60), st.integers(0, 500), st.integers(0, 500))
def test_a_position_has_one_sample_however_it_is_asked_for(seed, n, start, first, second):
    whole = order_samples(seed, n, start, first + second)
    assert whole.dtype == np.int64
    assert ((whole >= 0) & (whole < n)).all()
    parts = [order_samples(seed, n, start, first), order_samples(seed, n, start + first, second)]
    assert np.array_equal(whole, np.concatenate(parts))


@given(SEEDS, st.integers(1, 2000), st.lists(st.tuples(st.integers(1, 8), st.integers(1, 16)), min_size=1, max_size=30))
def test_exactly_once_whatever_the_degree_and_its_changes(seed, n, steps):
    """Each step has its own data-parallel degree and its own batch a rank; the ranks' shares follow one another."""
    consumed = 0
    seen = []
    for dp_size, share in steps:
        seen += [order_samples(seed, n, consumed + rank * share, share) for rank in range(dp_size)]
        consumed += dp_size * share
    times = np.bincount(np.concatenate(seen), minlength=n)
    assert times.min() == consumed // n
    assert times.max() == -(-consumed // n)
    assert np.array_equal(np.concatenate(seen), order_samples(seed, n, 0, consumed))


@pytest.mark.parametrize("n", [1000, 1437, 4096, 100_003])
def test_the_order_is_well_mixed(n):
    order = order_samples(seed=1, n=n, start=0, count=n)
    noise = 5 / np.sqrt(n)  # five standard deviations of a correlation between independent values
    assert (order == np.arange(n)).sum() < 12  # a random permutation has 1 fixed point, and 12 never
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < noise
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < noise
    low_in_first_half = (order[: n // 2] < n // 2).mean()
    assert abs(low_in_first_half - 0.5) < noise


def test_first_samples_are_uniform_over_seeds():
    firsts = np.array([order_samples(seed, 10, 0, 1)[0] for seed in range(5000)])
    expected = 500
    statistic = ((np.bincount(firsts, minlength=10) - expected) ** 2 / expected).sum()
    assert statistic < 34  # chi squared with 9 degrees of freedom: p = 1e-4


def test_all_orders_of_a_small_set_occur():
    assert {tuple(order_samples(seed, 4, 0, 4)) for seed in range(1000)} == {
        (a, b, c, d) for a in range(4) for b in range(4) for c in range(4) for d in range(4) if len({a, b, c, d}) == 4
    }


def test_epochs_and_seeds_differ():
    orders = [order_samples(seed, 1000, epoch * 1000, 1000) for seed in range(5) for epoch in range(5)]
    for one, other in combinations(orders, 2):
        assert (one == other).mean() < 0.02


def test_the_order_is_the_same_in_every_release():
    """A checkpoint means these very samples; if this fails, the change must not be made."""
    assert order_samples(0, 1000, 0, 6).tolist() == [143, 360, 872, 940, 214, 662]
    large = order_samples(2**63 - 1, 10**12 + 39, 10**15, 4)
    assert large.tolist() == [188297399113, 306806641403, 929649558352, 103255063621]
