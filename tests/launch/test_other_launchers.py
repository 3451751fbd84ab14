"""`hpc-train train` started by torchrun or mpirun joins as a rank."""

from __future__ import annotations

import json
import sys

from jobs import COMMAND, FAULTY, Workshop, numbers, processes, saved_steps

from hpc_train.errors import EXIT_USER_ERROR

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
AS_MODULE = ("-m", "hpc_train", "train")


def launcher_of(workshop: Workshop) -> list[int]:
    rank_map = json.loads((workshop.folder / "run/rankmap.json").read_text())
    return [entry["process"] for entry in rank_map["ranks"]]


def test_torchrun_restarts_a_job_that_lost_a_rank_and_it_resumes(workshop: Workshop) -> None:
    ended = workshop.train(
        "run",
        *FAULTY,
        "train.steps=6",
        "checkpoint.every=2",
        "checkpoint.background=false",  # or the rank may be gone before the save of step 2 is
        faults="1:train:4:kill",
        command=(*TORCHRUN, "--max-restarts", "1", *AS_MODULE),
    )
    assert ended.code == 0, ended
    assert "resumed at step 2 of 6" in ended.out
    assert [line[0] for line in numbers(workshop.folder / "run")] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (workshop.folder / "run/logs").iterdir()) == ["0", "1"]
    assert processes(workshop.folder) == []


def test_mpirun_trains_and_says_when_there_is_nothing_left(workshop: Workshop) -> None:
    overrides = (*FAULTY, "train.steps=3")
    ended = workshop.train("run", *overrides, command=(*MPIRUN, *COMMAND))
    assert ended.code == 0, ended
    assert "over 2 ranks" in ended.out
    assert "done: 3 steps" in ended.out
    assert launcher_of(workshop) == [0, 1]
    assert saved_steps(workshop.folder / "run") == [3]

    again = workshop.train("run", *overrides, command=(*MPIRUN, *COMMAND))
    assert again.code == 0, again
    assert again.out.count("already done") == 1


def test_a_mistake_of_the_user_under_mpirun_is_told_once(workshop: Workshop) -> None:
    ended = workshop.train("run", *FAULTY, "parallel.tp=3", "train.steps=3", command=(*MPIRUN, *COMMAND))
    assert ended.code == EXIT_USER_ERROR, ended
    assert ended.err.count("hpc-train: ") == 1
    assert "Traceback" not in ended.err


def test_an_mpi_library_that_is_not_mpiruns_is_one_line(workshop: Workshop) -> None:
    others = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ended = workshop.train("run", *FAULTY, "train.steps=3", **others)
    assert ended.code == EXIT_USER_ERROR, ended
    (line,) = ended.err.splitlines()
    assert line == (
        "hpc-train: mpirun started 2 processes but mpi4py sees 1: mpi4py loads another MPI library than mpirun's"
    )
