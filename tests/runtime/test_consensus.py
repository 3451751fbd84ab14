"""All ranks succeed or fail together, with a process group and before there is one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hpc_train.errors import RemoteError, UserError
from hpc_train.interfaces import Task, World
from hpc_train.runtime.consensus import Consensus, decide_on_process_0
from hpc_train.runtime.store.exchange import append_to, arrive_at_gate, count_arrived, gather_from, wait_for_gate
from hpc_train.testing import run_ranks

PROCESSES = 3


def decide(work: Callable[[], Any]) -> list[Any]:
    """Outcome of one decision on each process: its result, or its UserError as text. Only process 0 may work."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def run(process: int) -> Any:
        task = Task(process, PROCESSES, process, 0, 1, "slurm", "localhost", store)
        try:
            return decide_on_process_0(task, "question", work if process == 0 else pytest.fail)
        except UserError as error:
            return f"refused: {error}"

    with ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(run, range(PROCESSES)))


@pytest.mark.parametrize("result", [None, {}, {"refused": True}, ["a", 1]])
def test_every_process_gets_the_result_of_process_0(result: Any) -> None:
    assert decide(lambda: result) == [result] * PROCESSES


def test_every_process_raises_the_user_error_of_process_0() -> None:
    def refuse() -> None:
        raise UserError("run_dir=x: belongs to another user")

    assert decide(refuse) == ["refused: run_dir=x: belongs to another user"] * PROCESSES


def test_a_gate_opens_with_the_last_process() -> None:
    store = dist.HashStore()
    append_to(store, "list", {"process": 0})
    assert not arrive_at_gate(store, "gate", 2)
    assert not wait_for_gate(store, "gate", timedelta(seconds=0.2))
    assert count_arrived(store, "gate") == 1
    append_to(store, "list", {"process": 1})
    assert arrive_at_gate(store, "gate", 2)
    assert wait_for_gate(store, "gate", timedelta(seconds=5))
    assert gather_from(store, ["list"]) == [[{"process": 0}, {"process": 1}]]


def outcomes(world: World) -> list[str]:
    """Of four agreements: which ranks worked, and what each rank got or raised."""
    consensus, only_user_errors = Consensus(), Consensus(shared=())
    calls: list[int] = []

    def fail_on_rank_1() -> int:
        if world.rank == 1:
            raise ValueError("no room")
        return world.rank

    def fail_by_user() -> None:
        raise UserError("data.path=x: does not exist")

    def attempt(agree: Callable[[], Any]) -> str:
        try:
            return repr(agree())
        except (RemoteError, UserError) as error:
            return f"{type(error).__name__}: {error}"

    return [
        attempt(lambda: consensus.gather_and_decide(world, lambda: world.rank, sum)),
        attempt(lambda: consensus.gather_and_decide(world, fail_on_rank_1, sum)),
        attempt(lambda: only_user_errors.run_on_rank_0_first(world, lambda: calls.append(world.rank) or world.rank)),  # type: ignore[func-returns-value]
        attempt(lambda: only_user_errors.run_on_rank_0_first(world, fail_by_user)),
        str(calls),
    ]


def test_ranks_agree_on_results_and_errors() -> None:
    for rank, found in enumerate(run_ranks(outcomes, PROCESSES)):
        assert found == [
            "3",
            "RemoteError: rank 1: ValueError: no room",
            str(rank),
            "UserError: data.path=x: does not exist",
            f"[{rank}]",
        ]


def test_an_error_that_is_not_shared_is_raised_as_it_is() -> None:
    def fail() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        Consensus(shared=()).run_on_rank_0(None, fail)
