"""The simulation meets the closed forms of the papers, and two orders worked out by hand."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.parallel import SCHEDULES
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.schedules.order import Action, Kind, Order, Overlap
from hpc_train.schedules.simulate import ActionTimes, Simulation, simulate_order

SIZES = [
    (ranks, micro_batches) for ranks, micro_batches in product((2, 3, 4, 8), (8, 16, 24)) if not micro_batches % ranks
]
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.75), (3.0, 2.0, 2.0)]


def run(name: str, ranks: int, micro_batches: int, each: tuple[float, float, float], virtual: int = 1) -> Simulation:
    order = generate_order(name, ranks, micro_batches, virtual)
    return simulate_order(order, ActionTimes.even(order.stages, *each))


@pytest.mark.parametrize("each", TIMES)
def test_naive_uses_one_rank_in_p(each: tuple[float, float, float]) -> None:
    for ranks, micro_batches in SIZES:
        assert run("naive", ranks, micro_batches, each).bubble == pytest.approx([1 - 1 / ranks] * ranks)


@pytest.mark.parametrize("each", TIMES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b(name: str, each: tuple[float, float, float]) -> None:
    """Narayanan et al. 2021, section 2.2.1."""
    for ranks, micro_batches in SIZES:
        if micro_batches >= ranks:
            expected = (ranks - 1) / (micro_batches + ranks - 1)
            assert run(name, ranks, micro_batches, each).bubble == pytest.approx([expected] * ranks)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_v(name: str, virtual: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: (p - 1) (f + b) / v; breadth first loses as much (Lamy-Poirier 2023)."""
    for ranks, micro_batches in SIZES:
        expected = (ranks - 1) / (virtual * micro_batches + ranks - 1)
        assert run(name, ranks, micro_batches, TIMES[0], virtual).bubble == pytest.approx([expected] * ranks)


@pytest.mark.parametrize("each", TIMES)
def test_zero_bubble_h1(each: tuple[float, float, float]) -> None:
    """Qi et al. 2024, table 2: ZB-H1 is idle for (p - 1)(F + I - W), with the activations of 1F1B's first rank."""
    forward, inputs, weights = each
    for ranks, micro_batches in SIZES:
        result = run("interleaved_zero_bubble", ranks, micro_batches, each)
        idle = [result.makespan - busy for busy in result.busy]
        assert idle == pytest.approx([(ranks - 1) * (forward + inputs - weights)] * ranks)
        assert max(result.live) == max(run("1f1b", ranks, micro_batches, each).live) == ranks


def test_zbv_is_never_idle_between_its_first_and_last_action() -> None:
    """Qi et al. 2024, section 6: where F, I and W take as long; rank r only begins r forwards late."""
    for ranks, micro_batches in SIZES:
        if micro_batches < 2 * ranks - 1:
            continue  # too few to fill the pipeline
        result = run("zbv", ranks, micro_batches, TIMES[0], 2)
        assert [spans[-1].end - spans[0].start for spans in result.spans] == pytest.approx(result.busy)
        assert [spans[0].start for spans in result.spans] == list(range(ranks))
        assert max(result.live) == 2 * ranks  # half a rank's layers each: as 1F1B's first rank


def test_less_is_lost_the_more_a_schedule_splits() -> None:
    shares = {}
    for name in SCHEDULES:
        stages = REQUIREMENTS[name].virtual_stages
        shares[name] = run(name, 4, 16, (1 / stages, 1 / stages, 1 / stages), stages).mean_bubble
    by_loss = sorted(shares, key=lambda name: (round(shares[name], 9), SCHEDULES.index(name)))
    assert by_loss == [
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
        "interleaved_1f1b",
        "looped_bfs",
        "gpipe",
        "1f1b",
        "naive",
    ]


def test_activations_that_are_held() -> None:
    assert run("gpipe", 4, 8, TIMES[0]).live == (8, 8, 8, 8)
    assert run("1f1b", 4, 8, TIMES[0]).live == (4, 3, 2, 1)
    assert run("naive", 4, 8, TIMES[0]).live == (1, 1, 1, 1)


def test_communication_delays_what_another_rank_waits_for() -> None:
    order = generate_order("gpipe", 2, 1)
    result = simulate_order(order, ActionTimes((2.0, 3.0), (1.0, 4.0), (0.5, 0.25), communication=10.0))
    assert [[(span.start, span.end) for span in spans] for spans in result.spans] == [
        [(0, 2), (29.25, 30.75)],
        [(12, 15), (15, 19.25)],
    ]
    assert result.bubble == pytest.approx((1 - 3.5 / 30.75, 1 - 7.25 / 30.75))


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    order = generate_order("zbv", 1, 2)
    assert simulate_order(order, ActionTimes.even(2, communication=100.0)).makespan == 2 * 2 * 3


def test_both_results_of_an_overlap_leave_at_its_end() -> None:
    first, second = Action(0, Kind.F, 0), Action(1, Kind.F, 0)
    pair = Overlap(Action(0, Kind.F, 1), Action(0, Kind.B, 0))
    rows = (
        (first, pair, Action(0, Kind.B, 1)),
        (second, Action(1, Kind.B, 0), Action(1, Kind.F, 1), Action(1, Kind.B, 1)),
    )
    result = simulate_order(Order(rows, (0, 1)), ActionTimes.even(2))
    ends = {str(span.action): (span.start, span.end) for spans in result.spans for span in spans}
    assert (ends["0F1"], ends["0B0"], ends["1F1"]) == ((1, 2), (4, 6), (6, 7))


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.integers(1, 12),
    st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
)
def test_nothing_starts_before_what_it_needs_or_while_its_rank_is_busy(
    name: str, ranks: int, micro_batches: int, times: list[float]
) -> None:
    micro_batches = micro_batches * ranks * (2 if name == "dualpipev" else 1)
    order = generate_order(name, ranks, micro_batches)
    each = ActionTimes.even(order.stages, *times)
    result = simulate_order(order, each)
    ended = {given: span.end for spans in result.spans for span in spans for given in span.action.results}
    for rank, spans in enumerate(result.spans):
        free = 0.0
        for span in spans:
            assert span.start >= free
            assert span.end == pytest.approx(span.start + each.time_action(span.action))
            for needed in span.action.list_inputs(order.stages):
                away = order.placement[needed.stage] != rank
                assert span.start >= ended[needed] + (each.communication if away else 0) - 1e-9
            free = span.end
    assert result.makespan == max(ended.values())
