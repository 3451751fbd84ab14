"""One reader tells every launcher's ranks apart, and says in one line when the environment cannot be true."""

from __future__ import annotations

import environments as env
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import UserError
from hpc_train.runtime.identity import ProcessIdentity, identify_process, make_single_identity


def place(environment: dict[str, str]) -> tuple[str, int, int, int, int, int]:
    found = identify_process(environment)
    assert found is not None
    return found.launcher, found.process, found.processes, found.local, found.node, found.nodes


def test_tasks_of_a_slurm_step() -> None:
    places = [place(env.srun(process, process // 2, process % 2)) for process in range(4)]
    assert places == [
        ("slurm", 0, 4, 0, 0, 2),
        ("slurm", 1, 4, 1, 0, 2),
        ("slurm", 2, 4, 0, 1, 2),
        ("slurm", 3, 4, 1, 1, 2),
    ]


def test_a_slurm_task_is_on_the_node_that_slurm_names() -> None:
    found = identify_process(env.srun(2, 1, 0))
    assert found is not None
    assert found.host == "node4"


def test_a_step_counts_its_own_tasks_not_those_of_the_job() -> None:
    smaller = env.srun(0, 0, 0) | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    assert place(smaller) == ("slurm", 0, 1, 0, 0, 1)


def test_a_requeued_job_meets_under_another_key() -> None:
    first, again = (
        identify_process(env.srun(0, 0, 0)),
        identify_process(env.srun(0, 0, 0) | {"SLURM_RESTART_COUNT": "1"}),
    )
    assert first is not None
    assert again is not None
    assert first.attempt_key != again.attempt_key


def test_a_batch_script_is_no_rank() -> None:
    assert identify_process(env.batch_script()) is None


def test_a_shell_of_srun_pty_is_no_rank() -> None:
    assert identify_process(env.pty_shell()) is None


def test_a_step_started_from_such_a_shell_has_ranks() -> None:
    inherited = {"SLURM_PTY_PORT": "44937"}
    assert place(env.srun(3, 1, 1) | inherited) == ("slurm", 3, 4, 1, 1, 2)


def test_tasks_of_submitit() -> None:
    assert [place(env.submitit_local(process)) for process in range(2)] == [
        ("submitit", 0, 2, 0, 0, 1),
        ("submitit", 1, 2, 1, 0, 1),
    ]


def test_workers_of_torchrun() -> None:
    assert [place(env.torchrun(process)) for process in (1, 2)] == [
        ("torchrun", 1, 4, 1, 0, 2),
        ("torchrun", 2, 4, 0, 1, 2),
    ]


def test_restarted_workers_of_torchrun_meet_under_another_key() -> None:
    first, again = identify_process(env.torchrun(0)), identify_process(env.torchrun(0, restarts=1))
    assert first is not None
    assert again is not None
    assert first.attempt_key != again.attempt_key


def test_ranks_started_by_hand_with_torch_names() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert place(by_hand)[:3] == ("torchrun", 1, 2)


def test_processes_of_open_mpi_on_one_node() -> None:
    assert [place(env.open_mpi(process, 2, process, 2)) for process in range(2)] == [
        ("mpi", 0, 2, 0, 0, 1),
        ("mpi", 1, 2, 1, 0, 1),
    ]


def test_processes_of_open_mpi_on_two_nodes() -> None:
    assert place(env.open_mpi(3, 4, 1, 2)) == ("mpi", 3, 4, 1, 1, 2)


def test_processes_of_mpich() -> None:
    assert [place(env.mpich(process)) for process in (1, 2)] == [("mpi", 1, 4, 1, 0, 2), ("mpi", 2, 4, 0, 1, 2)]


@pytest.mark.parametrize(
    ("inner", "launcher"),
    [
        (env.torchrun(3), "torchrun"),
        (env.open_mpi(3, 4, 1, 2), "mpi"),
        (env.mpich(3), "mpi"),
        (env.submitit_local(1), "submitit"),
    ],
    ids=["torchrun", "open-mpi", "mpich", "submitit"],
)
@pytest.mark.parametrize(
    "outer", [env.srun(1, 0, 1), env.batch_script(), env.pty_shell()], ids=["step", "batch", "pty"]
)
def test_inside_slurm_the_innermost_launcher_wins(outer: dict[str, str], inner: dict[str, str], launcher: str) -> None:
    assert place(outer | inner)[0] == launcher
    assert place(outer | inner) == place(inner)


def test_without_a_launcher_there_is_no_identity() -> None:
    assert identify_process({"PATH": "/usr/bin", "HOME": "/root"}) is None
    assert (make_single_identity().process, make_single_identity().processes) == (0, 1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (env.srun(4, 1, 1), "process 4 of 4"),
        (env.srun(1, 2, 1), "node 2 of 2"),
        (env.srun(1, 0, 4), "local index 4 among 4 processes"),
        (env.srun(0, 0, 0) | {"SLURM_STEP_NUM_NODES": "9"}, "4 processes on 9 nodes"),
        (env.srun(0, 0, 0) | {"SLURM_PROCID": "first"}, "SLURM_PROCID='first' is not a whole number"),
        (env.srun(0, 0, 0) | {"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1' is not a whole number"),
        (env.torchrun(0) | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 must be at least 1"),
        (env.torchrun(0) | {"WORLD_SIZE": "9" * 5000}, "is not a whole number"),
        (env.open_mpi(2, 2, 0, 2), "process 2 of 2"),
        (env.mpich(0) | {"PMI_SIZE": "0"}, "process 0 of 0"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ],
)
def test_what_cannot_be_true_is_one_line(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as wrong:
        identify_process(environment)
    assert words in str(wrong.value)
    assert len(str(wrong.value).splitlines()) == 1


_NAMES = sorted(
    {
        *env.srun(0, 0, 0),
        *env.pty_shell(),
        *env.submitit_local(0),
        *env.torchrun(0),
        *env.open_mpi(0, 1, 0, 1),
        *env.mpich(0),
    }
)
_VALUES = st.one_of(
    st.integers(-3, 9).map(str), st.text(max_size=5), st.sampled_from(["", "0x1", "1e3", "٣", "²", "1_0"])
)


@given(st.dictionaries(st.sampled_from(_NAMES), _VALUES))
def test_no_environment_gives_anything_but_an_identity_none_or_one_line(environment: dict[str, str]) -> None:
    try:
        found = identify_process(environment)
    except UserError as error:
        lines = str(error).splitlines()
    else:
        lines = []
        assert found is None or isinstance(found, ProcessIdentity)
        assert found is None or (0 <= found.process < found.processes and 0 <= found.node < found.nodes)
    assert len(lines) <= 1
