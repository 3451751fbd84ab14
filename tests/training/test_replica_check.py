"""Copies of parameters are compared by the sums of their bits."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from training_runs import SMALL, small, with_run

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_engine, make_model
from hpc_train.training.numerics import replica_check
from hpc_train.training.numerics.number_checks import RanksDisagree, check_numbers
from hpc_train.training.numerics.replica_check import ReplicaCheck, find_minority
from hpc_train.training.step import train_step
from hpc_train.training.training_run import TrainingRun


def compare(world: World, config: RunConfig, wrong: list[int]) -> tuple[tuple[list[int], bool], tuple[list[int], bool]]:
    """What is found before and after one number of one parameter changes on the ranks in `wrong`."""
    engine = make_engine(config, world, make_model(config))
    check = ReplicaCheck(engine, world)
    before = check.find_differing_ranks()
    if world.rank in wrong:
        tensor = next(shard for shard in engine.shards() if shard.local.numel() and "." in shard.name).local
        tensor.view(-1)[-1] += 1e-3
    return before, check.find_differing_ranks()


@pytest.mark.parametrize(
    ("words", "ranks", "wrong", "found"),
    [
        (("parallel=ddp", "train.global_batch=6"), 3, [1], ([1], True)),
        (("parallel=ddp",), 2, [0], ([0, 1], False)),
        (("parallel=fsdp",), 2, [1], ([], True)),
        (("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2"), 4, [3], ([1, 3], False)),
        (("parallel=ddp", "parallel.pp=2"), 4, [0], ([0, 1], False)),
    ],
    ids=["ddp", "two copies", "nothing twice", "hsdp", "pipeline"],
)
def test_the_rank_whose_parameters_changed_is_found(
    words: tuple[str, ...], ranks: int, wrong: list[int], found: tuple[list[int], bool]
) -> None:
    config = compose([*SMALL, *words])
    for before, after in run_ranks(compare, ranks, config, wrong, parallel=config.parallel):
        assert before == ([], True)
        assert after == found


@pytest.mark.parametrize("seed", range(50))
def test_the_minority_of_each_place_is_odd(seed: int) -> None:
    draw = random.Random(seed)
    sums = [(draw.randrange(3), draw.choice([7, 7, 7, 7, 8])) for _ in range(draw.randint(1, 12))]
    odd, sure = find_minority(sums)
    for place in {place for place, _ in sums}:
        ranks = [rank for rank, (at, _) in enumerate(sums) if at == place]
        counts = Counter(sums[rank][1] for rank in ranks)
        if len(counts) == 1:
            assert not set(odd) & set(ranks)
        elif counts[7] == counts[8]:
            assert set(ranks) <= set(odd)
            assert not sure
        else:
            rare = min(counts, key=lambda value: counts[value])
            assert set(odd) & set(ranks) == {rank for rank in ranks if sums[rank][1] == rare}


@pytest.mark.parametrize(
    ("kinds", "found"), [(1, "copies of parameters are no longer equal, as they were after step 0"), (2, "")]
)
def test_a_number_that_changes_in_the_first_steps_is_found_where_devices_round_alike(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: int, found: str
) -> None:
    def change_a_number(run: TrainingRun) -> str:
        monkeypatch.setattr(replica_check, "probe_rounding", lambda device: run.world.rank % kinds)
        for step in range(3):
            train_step(run)
            if step == run.world.rank == 1:
                next(iter(run.engine.shards())).local.view(-1)[0] += 1e-3
        try:
            check_numbers(run, lambda: None)
        except RanksDisagree as error:
            return str(error)
        assert run.numbers.replicas is None
        return ""

    for said in with_run(small(store, tmp_path / "run"), change_a_number):
        assert said.startswith(found)
        assert bool(said) == bool(found)


def test_a_device_makes_the_same_bits_of_the_same_numbers() -> None:
    assert replica_check.probe_rounding(torch.device("cpu")) == replica_check.probe_rounding(torch.device("cpu"))
