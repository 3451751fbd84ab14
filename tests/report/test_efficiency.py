"""The split of a step: factors multiply to the measured whole, and each loss is found where it was put."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_table, waits

from hpc_train.bench.bubble_rank import make_sleep_times
from hpc_train.report.efficiency import LOSSES, Pipeline, measure_work, simulate_bubble, split_step
from hpc_train.report.pages.pipeline_spans import simulate_spans
from hpc_train.report.step_table import StepTable
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.schedules.simulate import simulate_order

WORK = 0.03 + 0.06 + 0.001 + 0.004


def test_a_rank_that_is_late_makes_the_others_wait(tmp_path: Path) -> None:
    """Rank 2 takes 50 ms longer; the collective itself takes 10 ms."""

    def change(rank: int, step: int) -> dict[str, object]:
        return {"backward": 0.11, "waits": waits(0.01)} if rank == 2 else {"waits": waits(0.06)}

    losses = split_step(make_table(tmp_path, 4, change))
    assert losses is not None
    assert losses.losses["transfer"] == pytest.approx(0.01, rel=1e-3)
    assert losses.losses["load_balance"] == pytest.approx(0.05 * 3 / 4, rel=1e-3)
    assert losses.useful == pytest.approx(WORK + 0.05 / 4, rel=1e-3)
    assert np.prod(list(losses.efficiencies.values())) == pytest.approx(losses.useful / losses.total, rel=1e-9)


def test_ranks_that_are_late_in_turn_are_serialisation(tmp_path: Path) -> None:
    def change(rank: int, step: int) -> dict[str, object]:
        late = step % 2 == rank
        return {"backward": 0.08, "waits": waits(0.0)} if late else {"waits": waits(0.02)}

    losses = split_step(make_table(tmp_path, 2, change))
    assert losses is not None
    assert losses.losses["load_balance"] == pytest.approx(0.0, abs=1e-6)
    assert losses.losses["transfer"] == pytest.approx(0.0, abs=1e-6)
    assert losses.losses["serialisation"] == pytest.approx(0.01, rel=1e-2)


def test_collectives_are_compared_one_by_one(tmp_path: Path) -> None:
    """Rank 0 is late at the first, rank 1 at the second; neither transfer takes any time."""
    losses = split_step(
        make_table(tmp_path, 2, lambda rank, step: {"waits": waits(*((0.0, 0.02) if rank else (0.02, 0.0)))})
    )
    assert losses is not None
    assert losses.losses["transfer"] == pytest.approx(0.0, abs=1e-6)


def test_the_bubble_is_that_of_the_schedule(tmp_path: Path) -> None:
    """GPipe's formula, from equal stages."""
    p, m = 4, 8
    pipeline = Pipeline(generate_order("gpipe", p, m), tuple(range(p)), (1.0,) * p, m)
    idle = WORK * (p - 1) / m
    losses = split_step(make_table(tmp_path, p, lambda rank, step: {"waits": waits(idle)}), pipeline)
    assert losses is not None
    assert losses.bubble_share == pytest.approx((p - 1) / (m + p - 1), rel=1e-6)
    assert losses.losses["bubble"] == pytest.approx(idle, rel=1e-3)


@pytest.mark.parametrize("schedule", sorted(REQUIREMENTS))
def test_the_bubble_is_that_of_bench_bubble(schedule: str) -> None:
    p, m = 4, 8
    order = generate_order(schedule, p, m)
    pipeline = Pipeline(order, tuple(range(p)), (1.0,) * p, m)
    _, share = simulate_bubble(np.full(p, WORK), pipeline)
    benchmarked = simulate_order(order, make_sleep_times(order, WORK / m / 3))
    assert share == pytest.approx(benchmarked.mean_bubble, rel=1e-9)
    _, seconds = simulate_spans(np.full(p, WORK), pipeline)
    assert seconds == pytest.approx(benchmarked.makespan, rel=1e-9)


positive = st.floats(0, 1, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[positive] * 6), min_size=2, max_size=6), positive)
def test_factors_multiply_to_the_whole_whatever_was_measured(rows: list[tuple[float, ...]], extra: float) -> None:
    """Also for inconsistent measurements, as clocks that disagree make them."""
    columns = np.array(rows)[:, :, None].repeat(6, axis=2)
    names = ("forward", "backward", "clip", "update", "data", "save")
    fields = {name: columns[:, index] for index, name in enumerate(names)}
    zero = np.zeros_like(columns[:, 0])
    fields |= {f"blocked_{name}": zero for name in ("forward", "clip", "rest")}
    fields |= {"blocked_backward": fields["backward"] / 2, "evaluate": zero, "steps": zero + 1}
    fields["total"] = sum((fields[name] for name in names), zero) + extra + 0.01
    shared = np.zeros((*zero.shape, 16))
    shared[..., 0] = fields["blocked_backward"]
    table = StepTable(tuple(range(len(rows))), np.arange(6.0), fields, shared)
    losses = split_step(table)
    assert losses is not None
    assert set(losses.losses) == set(LOSSES)
    assert all(seconds >= 0 for seconds in losses.losses.values())
    assert sum(losses.losses.values()) == pytest.approx(losses.total - losses.useful, rel=1e-9, abs=1e-12)
    if losses.useful > 1e-9:
        assert np.prod(list(losses.efficiencies.values())) == pytest.approx(losses.useful / losses.total, rel=1e-6)


def test_steps_that_a_rank_lacks_do_not_count(tmp_path: Path) -> None:
    table = make_table(tmp_path, 2, lambda rank, step: {})
    table["forward"][1, 5] = np.nan
    losses = split_step(table)
    assert losses is not None
    assert np.isfinite(losses.total)
    table["forward"][1] = np.nan
    assert split_step(table) is None
    assert np.isnan(measure_work(table)[1]).all()
