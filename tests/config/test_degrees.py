"""Degrees of the mesh axes: they multiply to the world, or the equation is printed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.parallel import (
    AXES,
    STRATEGIES,
    Degrees,
    ParallelConfig,
    compute_smallest_world,
    list_requested_degrees,
    resolve_degrees,
)
from hpc_train.errors import UserError

five_degrees = st.tuples(*[st.integers(1, 6)] * len(AXES))
strategies = st.sampled_from(STRATEGIES)


def config(strategy: str, degrees: tuple[int, ...]) -> ParallelConfig:
    return ParallelConfig(strategy=strategy, **dict(zip(AXES, degrees, strict=True)))


@given(strategies, five_degrees)
def test_degrees_that_are_all_given_are_taken_as_they_are(strategy: str, degrees: tuple[int, ...]) -> None:
    resolved = resolve_degrees(config(strategy, degrees), math.prod(degrees))
    assert resolved.sizes == degrees
    assert resolved.world == math.prod(degrees)
    assert resolved.data_parallel == degrees[1] * degrees[2]


@given(strategies, five_degrees, st.integers(0, len(AXES) - 1))
def test_minus_one_becomes_what_is_left_of_the_world(strategy: str, degrees: tuple[int, ...], left: int) -> None:
    asked = tuple(-1 if axis == left else size for axis, size in enumerate(degrees))
    assert resolve_degrees(config(strategy, asked), math.prod(degrees)).sizes == degrees
    assert compute_smallest_world(config(strategy, asked)) == math.prod(degrees) // degrees[left]


@given(strategies, five_degrees, st.integers(1, 500))
def test_degrees_that_do_not_multiply_to_the_world_print_the_equation(
    strategy: str, degrees: tuple[int, ...], world: int
) -> None:
    product = math.prod(degrees)
    if product == world:
        world += 1
    with pytest.raises(UserError) as caught:
        resolve_degrees(config(strategy, degrees), world)
    equation = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, degrees, strict=True))
    assert f"{equation} = {product}, but the world has {world} ranks" in str(caught.value)


@given(strategies, five_degrees, st.integers(0, len(AXES) - 1), st.integers(1, 500))
def test_a_world_that_the_fixed_degrees_do_not_divide_prints_the_equation(
    strategy: str, degrees: tuple[int, ...], left: int, world: int
) -> None:
    asked = tuple(-1 if axis == left else size for axis, size in enumerate(degrees))
    fixed = math.prod(degrees) // degrees[left]
    if world % fixed == 0:
        assert resolve_degrees(config(strategy, asked), world).world == world
        return
    with pytest.raises(UserError, match=rf"{AXES[left]} \? .*= {world} has no solution|{AXES[left]} \? = {world} has"):
        resolve_degrees(config(strategy, asked), world)


@given(strategies, st.sets(st.sampled_from(AXES), min_size=2))
def test_two_open_degrees_are_an_error_that_names_them(strategy: str, open_axes: set[str]) -> None:
    with pytest.raises(UserError, match="only one degree can be -1, what the others leave of the world") as caught:
        list_requested_degrees(ParallelConfig(strategy=strategy, **dict.fromkeys(open_axes, -1)))  # type: ignore[arg-type]
    assert all(f"parallel.{axis}=-1" in str(caught.value) for axis in open_axes)


@pytest.mark.parametrize("world", [1, 2, 12])
def test_left_to_itself_ddp_replicates_and_a_zero_strategy_shards(world: int) -> None:
    assert resolve_degrees(ParallelConfig(), world) == Degrees(1, world, 1, 1, 1)
    for strategy in ("zero1", "zero2", "zero3"):
        assert resolve_degrees(ParallelConfig(strategy=strategy), world) == Degrees(1, 1, world, 1, 1)


def test_hybrid_sharding_takes_the_rest_as_replicas() -> None:
    assert resolve_degrees(ParallelConfig(strategy="zero3", dp_replicate=-1, dp_shard=8), 32) == Degrees(1, 4, 8, 1, 1)


def test_an_open_degree_of_the_user_displaces_the_default_one() -> None:
    assert resolve_degrees(ParallelConfig(tp=-1), 4) == Degrees(1, 1, 1, 1, 4)
    assert resolve_degrees(ParallelConfig(strategy="zero3", pp=-1, dp_shard=2), 8) == Degrees(4, 1, 2, 1, 1)


@pytest.mark.parametrize("axis", AXES)
def test_a_degree_of_zero_is_an_error(axis: str) -> None:
    with pytest.raises(UserError, match=f"parallel.{axis}=0: a degree is at least 1"):
        list_requested_degrees(ParallelConfig(**{axis: 0}))  # type: ignore[arg-type]
