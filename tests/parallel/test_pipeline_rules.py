"""What a pipeline refuses, how it splits a model, and the bubble of a timeline: all without a rank."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from hpc_train.config.compose import compose
from hpc_train.config.parallel import SCHEDULES
from hpc_train.errors import UserError
from hpc_train.models.counts import compute_flops_per_token
from hpc_train.parallel.pipeline.measurement import TimelineEvent, format_chrome_trace, measure_bubble
from hpc_train.parallel.rules.check import check_support
from hpc_train.schedules import order, simulate
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.traffic.stages import compute_block_costs, read_block_costs, split_blocks

CSV = "0F0,0F1,0I0,0F2,0B1,0W0,0F3,0B3,0B2\n1F0,1I0,1F1,1W0,1B1,1F2,1F3,1B3,1B2\n"
"""An order that trains: 4 micro-batches over 2 ranks."""
BASE = ("model=llama_tiny", "train.global_batch=16", "train.micro_batch=4", "parallel.pp=2")


@pytest.mark.parametrize(
    ("costs", "stages"), [((0.0, 1.0, 5.0, 1.0, 1.0, 2.0, 4.0), 3), ((2.0, 1, 1, 1, 1, 1, 3.0), 2)]
)
def test_the_split_is_the_best_there_is(costs: tuple[float, ...], stages: int) -> None:
    blocks = len(costs) - 2

    def largest(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, blocks)
        sums = [sum(costs[1 + first : 1 + end]) for first, end in pairwise(ends)]
        sums[0] += costs[0]
        sums[-1] += costs[-1]
        return max(sums)

    found = split_blocks(read_block_costs(costs), stages)
    assert [index for held in found for index in held] == list(range(blocks))
    best = min(largest(cuts) for cuts in combinations(range(1, blocks), stages - 1))
    assert largest(tuple(held.start for held in found[1:])) == best


def test_costs_count_embedding_and_head() -> None:
    text = compute_block_costs(compose(("model=llama_tiny", "model.vocab_size=8192")).model, 64, 4)
    assert text.before == 0
    assert text.after > 2 * text.blocks[0], "a large head"
    assert [len(held) for held in split_blocks(text, 2)] == [3, 1]
    image = compose(("model=vit_tiny",)).model
    parts = compute_block_costs(image, 64, 4)
    assert parts.before > 0
    assert math.isclose(parts.before + sum(parts.blocks) + parts.after, compute_flops_per_token(image, 64) or 0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.pipeline.schedule=1f1",), "parallel.pipeline.schedule=1f1: no such schedule.*did you mean '1f1b'"),
        (("parallel.pipeline.schedule=no.csv",), r"no.csv: No such file"),
        (("parallel.pipeline.virtual_stages=2",), "virtual_stages=2: 1f1b has exactly 1 per rank"),
        (("parallel.pipeline.schedule=zbv", "parallel.pipeline.virtual_stages=3"), "zbv has exactly 2 per rank"),
        (("train.micro_batch=16",), "1f1b: over 2 ranks it needs at least 2 micro-batches and has 1"),
        (("parallel.pipeline.schedule=dualpipev", "train.micro_batch=8"), "needs at least 4"),
        (
            ("parallel.pipeline.schedule=interleaved_1f1b", "train.micro_batch=3", "train.global_batch=15"),
            "equal round",
        ),
        (("model.layers=1",), "2 stages for a model of 1 blocks"),
        (("parallel.pipeline.costs=[1,2]",), "costs: 2 values; give 6"),
        (("parallel.pipeline.costs=[1,1,1,-1,1,1]",), "each must be 0 or more"),
        (("parallel.pipeline.costs=[1,1,1,nan,1,1]",), "must be a finite number"),
        (("parallel.pipeline.schedule=zbv", "parallel.compile=true"), "compile=true: zbv computes the gradients"),
        (("parallel.pp=1", "parallel.pipeline.timeline=true"), "has no effect with parallel.pp=1"),
    ],
)
def test_what_cannot_be_is_one_line(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        check_support(compose((*BASE, *overrides)), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CSV.replace("1B3,1B2", "1B3"), "1I2 and 1W2 is missing"),
        (CSV.replace("0F0,0F1,0I0", "0F0,0I0,0F1").replace("1F0,1I0,1F1", "1F0,1F1,1I0"), "deadlock"),
        (CSV.replace("1F2,1F3", "1F3,1F2"), "the last stage has to take its micro-batches in order"),
        (CSV.splitlines()[0], "is for 1 ranks"),
        (CSV.replace("0F0", "0X0"), "line 1, column 1: '0X0' is not an action"),
        ("\n".join(",".join(row) for row in order.format_rows(generate_order("1f1b", 2, 3))), "is for 3 micro-batches"),
    ],
)
def test_a_schedule_from_a_file_is_proved_before_it_runs(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        check_support(compose((*BASE, f"parallel.pipeline.schedule={path}")), 2)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_schedule_from_a_file_that_trains_passes(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(CSV)
    assert check_support(compose((*BASE, f"parallel.pipeline.schedule={path}")), 2).pp == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_of_a_timeline_is_that_of_its_order(schedule: str) -> None:
    order = generate_order(schedule, 4, 8)
    times = simulate.ActionTimes.even(order.stages, 1.0, 2.0, 3.0)
    ran = simulate.simulate_order(order, times)
    ranks = [
        [TimelineEvent(s.start, s.end, str(s.action.kind), s.action.stage, s.action.micro_batch, 0) for s in spans]
        for spans in ran.spans
    ]
    np.testing.assert_allclose(measure_bubble(ranks), ran.bubble)
    if REQUIREMENTS[schedule].micro_batches_per_rank == 1:
        np.testing.assert_allclose(measure_bubble(ranks), 3 / (8 + 3))
    assert len(json.loads(format_chrome_trace(ranks[0], 0))["traceEvents"]) == len(ranks[0])
