"""Parameters tensor by tensor: as many as the shape says and as ranks of tp really hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.compose import compose
from hpc_train.config.keys.groups import find_option_files
from hpc_train.config.model import TransformerConfig
from hpc_train.models.counts import count_parameters
from hpc_train.traffic.axes import count_fsdp_groups, list_ddp_buckets
from hpc_train.traffic.weights import Splitting, count_rank_elements, list_partial_gradient_sizes, list_weights
from hpc_train.units import MIB

SHIPPED = [name for name in find_option_files("model") if name not in ("custom", "hf")]


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_are_all_parameters(name: str) -> None:
    model = compose((f"model={name}", "train.sequence_length=64")).model
    weights = list_weights(model)
    assert weights is not None
    mixed = (*weights.block, *weights.experts) * (weights.blocks - weights.dense_blocks)
    every = [*weights.before, *weights.dense_block * weights.dense_blocks, *mixed, *weights.after]
    assert sum(weight.count for weight in every) == count_parameters(model)


def test_a_model_of_a_user_has_no_known_weights() -> None:
    assert list_weights(compose(("model=custom", "model.name=mine")).model) is None


LLAMA = TransformerConfig(name="llama", vocab_size=30, layers=2, hidden=24, heads=6, kv_heads=2, feed_forward=36)
EVEN, ODD = 24 * 24 * 2 + 24 * 36 * 3, 2 * 24 * 8
"""Matrices of a block: those that 3 ranks can share, and keys and values, which they cannot."""


def test_what_a_rank_of_tp_holds() -> None:
    weights = list_weights(LLAMA)
    assert weights is not None
    assert count_rank_elements(weights.block, Splitting(2, 2, True)) == (EVEN + ODD) // 2 + 2 * 24
    assert count_rank_elements(weights.block, Splitting(3, 2, True)) == EVEN // 3 + ODD + 2 * 24
    assert count_rank_elements(weights.before, Splitting(4, 2, True)) == 8 * 24, "30 rows over 4 ranks: 8 at most"
    assert count_rank_elements(weights.before, Splitting(4, 2, False)) == 30 * 24
    assert count_rank_elements(weights.before, Splitting(4, 2, True, shards=5)) == 10 * 24, (
        "8 rows over 5 shards: 2 each"
    )


def test_gradients_that_ranks_of_tp_add_up() -> None:
    weights = list_weights(LLAMA)
    assert weights is not None
    assert list_partial_gradient_sizes(weights.block, 1, 2, True) == []
    assert list_partial_gradient_sizes(weights.block, 2, 2, True) == [24, 24]
    assert sorted(list_partial_gradient_sizes(weights.block, 3, 2, False)) == [24 * 8, 24 * 8]
    gpt = list_weights(replace(LLAMA, kv_heads=None, bias=True, norm="layernorm"))
    assert gpt is not None
    assert list_partial_gradient_sizes(gpt.block, 2, 6, True) == [24] * 6, (
        "two norms with a bias each, and two biases of row-parallel layers"
    )


@given(sizes=st.lists(st.floats(1, 2**27), max_size=40), limit=st.none() | st.floats(0.1, 40))
def test_buckets_hold_everything_and_close_when_they_are_full(sizes: list[float], limit: float | None) -> None:
    found = list_ddp_buckets(sizes, limit)
    assert sum(found) == pytest.approx(sum(sizes))
    least = 2**20 if limit is None else limit * 2**20
    assert all(size >= least for size in found[:-1])


def test_a_gradient_that_just_fills_a_bucket_closes_it() -> None:
    """As torch does (compute_bucket_assignment_by_size closes a bucket of the limit's size)."""
    assert list_ddp_buckets([MIB, 25 * MIB, 25 * MIB, MIB], None) == [MIB, 25 * MIB, 25 * MIB, MIB]
    assert list_ddp_buckets([MIB, MIB, MIB], 2) == [2 * MIB, MIB]


def test_groups_are_whole_blocks_within_a_bucket() -> None:
    mib = 2**20
    assert count_fsdp_groups(4 * mib, 5, 4 * mib, None) == 0, "24 MiB: everything together"
    assert count_fsdp_groups(4 * mib, 6, 4 * mib, None) == 1, "28 MiB: the blocks, and the rest"
    assert count_fsdp_groups(10 * mib, 5, 0, None) == 3
    assert count_fsdp_groups(100 * mib, 5, 0, None) == 5, "a block of its own, where one is larger than a bucket"
    assert count_fsdp_groups(10 * mib, 5, 0, 30.0) == 2
