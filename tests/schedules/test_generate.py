import subprocess
import sys
from itertools import product

import pytest

from hpc_train.config.parallel import SCHEDULES
from hpc_train.errors import UserError
from hpc_train.schedules.generate import REQUIREMENTS, check_schedule, generate_order
from hpc_train.schedules.order import Kind, Order
from hpc_train.schedules.validate import find_problem, find_runtime_problem

VIRTUAL = {"interleaved_1f1b": (2, 3), "looped_bfs": (2, 3), "interleaved_zero_bubble": (1, 2, 3)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_is_complete_and_free_of_deadlock(name: str) -> None:
    made = 0
    virtual = VIRTUAL.get(name, (REQUIREMENTS[name].virtual_stages,))
    for stages, ranks, micro_batches in product(virtual, (1, 2, 3, 4, 7, 8), (*range(1, 18), 24)):
        try:
            order = generate_order(name, ranks, micro_batches, stages)
        except UserError:
            continue
        assert find_problem(order, micro_batches) is None, (ranks, micro_batches, stages)
        assert find_runtime_problem(order) is None
        assert (order.ranks, order.stages, order.micro_batches) == (ranks, ranks * stages, micro_batches)
        assert order.splits_backward == (REQUIREMENTS[name].splits_backward and Kind.W in kinds(order))
        made += 1
    assert made >= 20


def kinds(order: Order) -> set[Kind]:
    return {action.kind for rank in range(order.ranks) for action in order.actions(rank)}


@pytest.mark.parametrize("name", [name for name in SCHEDULES if REQUIREMENTS[name].splits_backward])
def test_a_schedule_that_splits_backward_says_so(name: str) -> None:
    assert generate_order(name, 4, 8).splits_backward


def test_nothing_of_it_needs_torch() -> None:
    modules = ", ".join(f"hpc_train.schedules.{name}" for name in ("generate", "validate", "order", "simulate"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_naive_and_gpipe_in_full() -> None:
    assert [list(map(str, row)) for row in generate_order("naive", 2, 2).rows] == [
        ["0F0", "0B0", "0F1", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    assert [list(map(str, row)) for row in generate_order("gpipe", 2, 2).rows] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
    ]


def test_one_forward_one_backward_in_full() -> None:
    """The last rank alternates from the start (Narayanan et al. 2021, figure 4)."""
    assert [" ".join(map(str, row)) for row in generate_order("1f1b", 3, 4).rows] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (("1f1b", 4, 3, 1), "over 4 ranks it needs at least 4 micro-batches and has 3"),
        (("dualpipev", 4, 7, 2), "it needs at least 8"),
        (("interleaved_1f1b", 4, 9, 2), "9 micro-batches do not make 2 equal rounds over 4 ranks; 8 or 10 would"),
        (("interleaved_zero_bubble", 4, 13, 2), "; 12 or 15 would, or use parallel.pipeline.schedule=looped_bfs"),
        (("gpipe", 2, 4, 2), "parallel.pipeline.virtual_stages=2: gpipe has exactly 1 per rank"),
        (("zbv", 2, 4, 1), "parallel.pipeline.virtual_stages=1: zbv has exactly 2 per rank"),
        (("zbv", 2, 4, 3), "exactly 2 per rank; leave it out, or use parallel.pipeline.schedule=interleaved_1f1b"),
        (("looped_bfs", 2, 4, 1), "at least 2 per rank"),
        (("1f2b", 2, 4, 1), "parallel.pipeline.schedule=1f2b: no such schedule; did you mean '1f1b'?"),
        (("1f1b", 0, 4, 1), "0 ranks"),
        (("1f1b", 2, 0, 1), "0 micro-batches"),
    ],
)
def test_what_a_schedule_cannot_do_is_one_line(numbers: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_schedule(*numbers)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_the_numbers_that_a_refusal_names_work_and_none_between_does(name: str) -> None:
    for ranks, count in product((2, 3, 4, 6), range(1, 40)):
        try:
            check_schedule(name, ranks, count, 2)
        except UserError as error:
            below, above = (int(word) for word in str(error).split("; ")[1].split(" would")[0].split(" or "))
            check_schedule(name, ranks, below, 2)
            check_schedule(name, ranks, above, 2)
            assert below < count < above
            for between in {*range(below + 1, above)} - {count}:
                with pytest.raises(UserError):
                    check_schedule(name, ranks, between, 2)
