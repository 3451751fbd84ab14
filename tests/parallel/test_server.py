"""Parameter servers under a real mpirun: what equals an all-reduce does, and what does not still learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.parallel.parameter_server.shared_parameters import assign_parameters, find_hosts
from hpc_train.parallel.rules.check import check_support

HERE = Path(__file__).parent
RANKS = 4


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks saw in one job."""
    command = ["mpirun", "-n", str(RANKS), "--oversubscribe", sys.executable, str(HERE / "server_ranks.py")]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("saved"))],
        env={**os.environ, **allowed},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("how", ["one", "sharded", "replicated", "hybrid"])
def test_synchronous_servers_give_the_numbers_of_an_all_reduce(seen: dict[str, Any], how: str) -> None:
    """Loss, norm, parameters and optimizer state after two clipped steps with accumulation, float64."""
    assert seen["synchronous"][how] <= 1e-13


def test_a_checkpoint_goes_on_with_other_servers(seen: dict[str, Any]) -> None:
    assert seen["resumed"] <= 1e-14


@pytest.mark.parametrize("how", ["asynchronous", "hybrid"])
def test_asynchronous_workers_learn_at_their_own_speed(seen: dict[str, Any], how: str) -> None:
    ranks = seen[how]
    first = sum(rank["first"] for rank in ranks) / RANKS
    assert len({rank["evaluated"] for rank in ranks}) == 1, "all ranks evaluate the same model"
    assert ranks[0]["evaluated"] < first / 2
    assert max(rank["ahead"] for rank in ranks) <= 2, "parallel.server.staleness=2"


def test_workers_of_unequal_speed_do_run_apart(seen: dict[str, Any]) -> None:
    assert max(rank["ahead"] for rank in seen["asynchronous"]) > 0


@pytest.mark.parametrize("how", ["asynchronous", "hybrid"])
def test_all_workers_stop_after_the_same_update(seen: dict[str, Any], how: str) -> None:
    """Rank 1 is asked at its 41st step; nobody can be more than staleness + 1 further."""
    stopped = {rank["stopped"] for rank in seen[how]}
    assert len(stopped) == 1
    assert stopped.pop() in range(40, 45)


def test_neighbours_agree_roughly_and_a_checkpoint_makes_them_equal(seen: dict[str, Any]) -> None:
    for rank in seen["peer"]:
        assert rank["last"] < rank["first"] / 2
        assert 0 < rank["apart"] < 0.05
        assert rank["apart_after"] == 0


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "peer"])
def test_a_save_beside_the_next_step_has_the_state_of_its_own(seen: dict[str, Any], mode: str) -> None:
    """Bit by bit, as server_ranks has seen. What others may write at any time is never copied late."""
    for errors, late in seen["saved"][mode]:
        assert errors == []
        assert (late > 0) == (mode == "peer")


def test_shares_are_even_and_hosts_are_apart() -> None:
    from plain_setup import model

    dealt = assign_parameters(list(model("untied").named_parameters()), 3)
    sizes = [sum(parameter.numel() for _, parameter in share) for share in dealt]
    assert max(sizes) < 1.3 * min(sizes)
    for servers, replicas, ranks in ((1, 1, 4), (2, 2, 4), (3, 4, 4), (4, 2, 8)):
        for index in range(servers):
            assert len(set(find_hosts(index, servers, replicas, ranks))) == replicas


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.server.servers=2",), "parallel.server.mode"),
        (("parallel.server.mode=synchronous", "parallel=fsdp"), "parallel.strategy=ddp"),
        (("parallel.server.mode=synchronous", "parallel.server.staleness=3"), "has an effect with mode=asynchronous"),
        (("parallel.server.mode=peer", "parallel.server.servers=2"), "has no servers"),
        (("parallel.server.mode=asynchronous", "parallel.server.servers=9"), "there are 4 ranks"),
        (("parallel.server.mode=asynchronous", "precision=fp16"), "precision=bf16"),
    ],
)
def test_what_servers_cannot_do_is_one_line(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        check_support(compose(overrides), 4)
    assert "\n" not in str(caught.value)


def test_ranks_that_mpi_did_not_start_are_refused(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hpc_train",
        "train",
        "parallel.server.mode=synchronous",
        f"run_dir={tmp_path}/run",
    ]
    said = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert said.returncode == 2
    assert len(said.stderr.splitlines()) == 1
    assert "mpirun" in said.stderr
    assert not (tmp_path / "run").exists()
