"""Law 1 on layouts that nobody thought of. More of them, from another seed on:

HPC_TRAIN_RANDOM_LAYOUTS=200 HPC_TRAIN_RANDOM_SEED=1000 pytest -m "" tests/parallel/test_random_layouts.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from drawn import draw as draw_some
from drawn import draw_every
from matrix import SEQUENCES, Case
from test_matrix import Elsewhere, check_case

from hpc_train.config.parallel import SCHEDULES
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support

EXAMPLES = int(os.environ.get("HPC_TRAIN_RANDOM_LAYOUTS", "6"))
FIRST = int(os.environ.get("HPC_TRAIN_RANDOM_SEED", "12"))
"""From 12 on come six layouts of few ranks in which every axis is split once."""
KINDS = ("llama", "tied", "deep", "grouped", "gpt2", "vit", "experts", "shared-experts", "latent")
DEGREES = {
    "pp": (1, 2, 2, 4),
    "cp": (1, 1, 1, 2, 4),
    "tp": (1, 1, 2, 4),
    "dp_replicate": (1, 1, 2),
    "dp_shard": (1, 1, 2, 4),
}
STRATEGIES = (
    ("ddp",),
    ("ddp", "bucket_mib=0.01"),
    ("zero1",),
    ("zero1", "bucket_mib=0.01"),
    ("zero2",),
    ("zero2", "bucket_mib=0.01", "prefetch=2"),
    ("zero3",),
    ("zero3", "prefetch=0"),
    ("zero3", "prefetch=3"),
    ("zero3", "reshard_after_forward=false"),
)
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("static_graph=true",),
    ("compression.method=topk", "compression.ratio=1"),
    ("offload.parameters=cpu",),
    ("offload.parameters=file",),
    ("offload.optimizer=cpu",),
    ("offload.optimizer=file",),
    ("pipeline.virtual_stages=1",),
    ("pipeline.virtual_stages=2",),
    ("pipeline.virtual_stages=3",),
    ("pipeline.costs=[0,1,1,3,1,2]",),
    ("ep=2",),
    ("ep=4",),
    ("tensor.sequence=false",),
    ("tensor.vocabulary=false",),
    ("tensor.asynchronous=true",),
    ("context.method=ulysses",),
    ("context.balanced=false",),
    ("train.loss_chunk=1",),
    ("train.loss_chunk=13",),
    ("recompute.mode=full",),
    ("recompute.mode=full", "recompute.every=2"),
    ("recompute.mode=selective",),
    ("recompute.mode=selective", "recompute.every=3", "recompute.keep=[attention]"),
)
"""Each changes what ranks do, and not what comes out."""


def draw(random: Random, kinds: tuple[str, ...] = KINDS, first: tuple[str, ...] = ()) -> Case:
    """A product of degrees up to 8, with `first` and those of some techniques that the rules let be together."""
    while True:
        degrees = {axis: random.choice(values) for axis, values in DEGREES.items()}
        ranks = math.prod(degrees.values())
        strategy, *ways = random.choice(STRATEGIES)
        words = [*(f"{axis}={degree}" for axis, degree in degrees.items()), f"strategy={strategy}", *ways]
        if degrees["pp"] > 1:
            words.append(f"pipeline.schedule={random.choice(SCHEDULES)}")
        words += first
        case = _with(Case(ranks, (), random.choice(kinds), random.choice((1, 2, 3, 5, SEQUENCES))), words)
        if 1 < ranks <= 8 and legal(case):
            return _optioned(case, random.sample(OPTIONS, 8))


def _optioned(case: Case, options: Iterable[tuple[str, ...]]) -> Case:
    for option in options:
        more = _with(case, option)
        case = more if legal(more) else case
    return case


def _with(case: Case, words: Iterable[str]) -> Case:
    settings = (word if word.startswith("train.") else f"parallel.{word}" for word in words)
    return replace(case, overrides=(*case.overrides, *settings))


def legal(case: Case) -> bool:
    """Whether the rules let it run, and whether its blocks have the operators whose results it keeps."""
    if case.kind == "capped" and any("keep=[attention]" in word for word in case.overrides):
        return False  # scores with a soft-cap are products of their own on a CPU
    try:
        check_support(case.config(), case.ranks)
    except UserError:
        return False
    return True


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere(tmp_path_factory)


@pytest.mark.parametrize("seed", draw_every(range(FIRST, FIRST + EXAMPLES), 6))
def test_any_legal_layout(seed: int, elsewhere: Elsewhere) -> None:
    case = draw(Random(seed))
    print(case)  # which pytest shows of a failure
    check_case(case, elsewhere)


EXPERT_KINDS = ("experts", "shared-experts", "latent")
EXPERT_SEEDS = range(FIRST, FIRST + EXAMPLES)


@pytest.mark.parametrize("seed", draw_some(EXPERT_SEEDS, EXPERT_SEEDS[3:4]))  # of two ranks
def test_any_legal_layout_of_expert_parallelism(seed: int, elsewhere: Elsewhere) -> None:
    random = Random(f"experts {seed}")
    case = draw(random, EXPERT_KINDS, (f"ep={random.choice((2, 4))}",))
    print(case)
    check_case(case, elsewhere)


WINDOW_KINDS = ("windows", "capped")
WINDOW_SEEDS = range(FIRST, FIRST + EXAMPLES)


@pytest.mark.parametrize("seed", draw_some(WINDOW_SEEDS, WINDOW_SEEDS[3:4]))  # of four ranks; the first has eight
def test_any_legal_layout_of_windows_and_soft_caps(seed: int, elsewhere: Elsewhere) -> None:
    case = draw(Random(f"windows {seed}"), WINDOW_KINDS)
    print(case)
    check_case(case, elsewhere)
