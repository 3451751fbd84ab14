"""The search finds what trying everything finds, and says how much that was."""

from __future__ import annotations

import numpy as np
import pytest
from planner_runs import NAMES, Row, as_run, rows_of, run

from hpc_train.config.parallel import AXES
from hpc_train.config.run import RunConfig
from hpc_train.planner import constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.memory import YES
from hpc_train.planner.model.step_time import estimate_jobs
from hpc_train.planner.search.degree_limits import find_degree_limits
from hpc_train.planner.search.search import FRONT_SLACK, SearchBase, SearchResult, search_space
from hpc_train.planner.search.space import FixedColumns, SearchSpace, iterate_blocks
from hpc_train.planner.search.top_candidates import (
    EQUAL_TIME_TOLERANCE,
    ParetoFront,
    RatedCandidates,
    layout_complexity,
    pareto_front,
)
from hpc_train.planner.settings import make_single_rank_config
from hpc_train.traffic.stages import ELEMENT_BYTES

SMALL = ("cluster=dgx_a100", "model=gpt3_1_3b", "precision=bf16", "train.sequence_length=2048", "train.global_batch=8")
TIGHT = ("cluster=dgx_a100", "model=gpt3_22b", "precision=bf16", "train.sequence_length=2048", "train.global_batch=16")
ACROSS = (*TIGHT, "cluster.node.gpus=4", "cluster.node.nvlink_domain_gpus=4")
FULL = ("cluster=dgx_a100", "model=gpt3_175b", "precision=bf16", "train.sequence_length=2048", "train.global_batch=64")


def find(
    config: RunConfig,
    world: int,
    exhaustive: bool = False,
    fixed: FixedColumns | None = None,
    keep: int = 8,
    host: float = 0.0,
) -> SearchResult:
    shape, reduce = find_degree_limits(config), ELEMENT_BYTES[config.precision.reduce]
    base = jobs_from_config(make_single_rank_config(config, shape.global_batch), 1)
    whole = SearchSpace(shape, world, fixed or FixedColumns())
    return search_space(SearchBase(base, reduce, host), whole, constants.default_constants(), keep, exhaustive)


def rows(rated: RatedCandidates) -> list[Row]:
    return list(zip(*(rated.columns[name].tolist() for name in NAMES), strict=True))


@pytest.mark.parametrize(
    ("overrides", "world", "fixed"),
    [
        (SMALL, 8, {}),
        (TIGHT, 8, {}),
        pytest.param(ACROSS, 16, {}, marks=pytest.mark.long),
        pytest.param(FULL, 16, {}, marks=pytest.mark.long),
        (TIGHT, 8, {"offload_activations": (1.0,), "overlap_tensor": (0.0,)}),
        (ACROSS, 16, {"cp": (2.0, 4.0), "overlap_tensor": (0.0,)}),
    ],
    ids=["small", "tight", "across", "full", "moved", "context"],
)
def test_bounds_leave_out_nothing_that_matters(
    overrides: tuple[str, ...], world: int, fixed: dict[str, tuple[float, ...]]
) -> None:
    bounded, everything = (
        find(run(*overrides), world, exhaustive, FixedColumns(fixed)) for exhaustive in (False, True)
    )
    for name in ("best", "doubtful", "front"):
        assert rows(getattr(bounded, name)) == rows(getattr(everything, name)), name
    assert bounded.searched == everything.searched == everything.estimated
    assert bounded.estimated < everything.estimated


def test_what_may_fit_is_found_where_nothing_surely_fits() -> None:
    stays = FixedColumns({"offload": (0.0,)})
    bounded, everything = (
        find(run(*SMALL, "cluster.gpu.memory_gib=14"), 2, exhaustive, stays) for exhaustive in (False, True)
    )
    assert (bounded.best.count, bounded.doubtful.count) == (0, 2)
    assert rows(bounded.doubtful) == rows(everything.doubtful)
    assert bounded.estimated < everything.estimated
    assert find(run(*SMALL, "cluster.gpu.memory_gib=15"), 2, fixed=stays).doubtful.count == 0


def test_no_mesh_is_found_by_chance() -> None:
    """Candidates slower than FRONT_SLACK times the best are left out: the order decides which of them are met."""
    found = find(run(*SMALL), 16, keep=1000).best
    assert found.count > 20
    assert found.step.max() <= FRONT_SLACK * found.step.min()


def test_it_finds_what_one_estimate_after_another_finds() -> None:
    """Each candidate as a run of its own, through jobs_of: nothing of the search's own columns is used."""
    config = run(*TIGHT)
    few = {"schedule": (2.0, 3.0), "virtual_stages": (1.0, 2.0), "micro_batch": (1.0,), "overlap_tensor": (0.0,)}
    fixed = FixedColumns(
        {**few, "reshard": (1.0,), "recompute_every": (1.0,), "cp": (1.0, 2.0), "sequence_parallel": (1.0,)}
    )
    fixed = FixedColumns({**fixed.values, "offload": (0.0, 2.0), "zero": (0.0, 1.0, 3.0)})
    found = find(config, 8, fixed=fixed)
    told = constants.default_constants()
    best: dict[Row, tuple[float, Row]] = {}
    sure = []
    for row in rows_of(SearchSpace(find_degree_limits(config), 8, fixed)):
        one = estimate_jobs(jobs_from_config(as_run(config, row), 8), told)
        step, fits = float(one.time.step), float(one.memory.fits)
        if fits == YES:
            sure.append((step, float(one.memory.total), row))
            mesh = tuple(row[NAMES.index(name)] for name in AXES)
            best[mesh] = min(best.get(mesh, (np.inf, row)), (step, row))
    quickest = min(sure)[0]
    assert found.searched == sum(b.count for b in iterate_blocks(SearchSpace(find_degree_limits(config), 8, fixed)))
    assert found.best.step.min() == pytest.approx(quickest, rel=1e-9)
    for row, step in zip(rows(found.best), found.best.step, strict=True):
        mesh = tuple(row[NAMES.index(name)] for name in AXES)
        assert best[mesh][0] * (1 - 1e-9) <= step <= best[mesh][0] * (1 + EQUAL_TIME_TOLERANCE)
    near = [it for it in sure if it[0] <= found.best.step.min() * FRONT_SLACK]
    ours = {(round(step, 9), round(held)) for step, held in zip(found.front.step, found.front.memory, strict=True)}
    points = np.array([it[:2] for it in near])
    assert ours == {(round(step, 9), round(held)) for step, held in points[pareto_front(points[:, 0], points[:, 1])]}


def test_the_best_is_the_simplest_of_those_that_are_as_quick() -> None:
    found = find(run(*SMALL), 8)
    alike = find(run(*SMALL), 8, exhaustive=True).best
    near = alike.take(np.flatnonzero(alike.step <= alike.step.min() * (1 + EQUAL_TIME_TOLERANCE)))
    assert layout_complexity(found.best.columns)[0] == layout_complexity(near.columns).min()


def test_a_model_too_large_for_its_world_has_no_candidates() -> None:
    found = find(run(*FULL), 1)
    assert (found.best.count, found.doubtful.count, found.front.count) == (0, 0, 0)
    assert found.searched > 100


def test_a_front_holds_what_nothing_beats() -> None:
    points = np.random.default_rng(3).integers(0, 12, (200, 2)).astype(np.float64)
    kept = points[pareto_front(points[:, 0], points[:, 1])]
    better = [(it < point).all() or ((it <= point).all() and (it < point).any()) for it in points for point in kept]
    assert not any(better)
    assert {tuple(point) for point in points if not _beaten(point, points)} == {tuple(point) for point in kept}
    assert len({tuple(point) for point in kept}) == len(kept)


def _beaten(point: np.ndarray, points: np.ndarray) -> bool:  # type: ignore[type-arg]
    return bool(((points <= point).all(axis=1) & (points < point).any(axis=1)).any())


def test_a_front_lets_pass_what_it_does_not_beat() -> None:
    grown = ParetoFront()
    assert grown.is_undominated(np.array([1.0]), np.array([1.0])).all()
    grown.update(np.array([1.0, 2.0]), np.array([5.0, 3.0]))
    tried = [
        (0.5, 9.0, True),
        (1.0, 5.0, False),
        (1.5, 4.0, True),
        (2.0, 3.0, False),
        (9.0, 2.9, True),
        (9.0, 3.0, False),
    ]
    one, other, free = (np.array(it) for it in zip(*tried, strict=True))
    assert grown.is_undominated(one, other).tolist() == free.tolist()


def test_what_is_offloaded_has_room_on_its_node() -> None:
    """The same space with ever less memory of a node: what is offloaded to it gets less, and ends."""
    config = run(*TIGHT)
    offload = FixedColumns({"offload": (1.0, 2.0)})
    states = 12 * 22e9  # about: two moments and the parameters, in fp32
    counts = [find(config, 8, fixed=offload, host=share * states).best.count for share in (0.0, 10.0, 0.1)]
    assert counts[0] == counts[1] > 0
    assert counts[2] == 0
    bounded, everything = (find(config, 8, exhaustive, offload, host=states) for exhaustive in (False, True))
    assert rows(bounded.best) == rows(everything.best)
