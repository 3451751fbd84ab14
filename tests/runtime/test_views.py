"""How MPI and Slurm see a process, against how its launcher counts it."""

from __future__ import annotations

from dataclasses import replace

from environments import batch_script, srun
from fact_helpers import changed, facts_of

from hpc_train.interfaces import Task
from hpc_train.runtime.host_info import (
    compare_with_mpi,
    compare_with_slurm,
    find_missing_mpi,
    find_mpi_disagreement,
    read_slurm_rank_and_size,
)

TASK = Task(2, 4, 0, 1, 2, "torchrun", "n1")


def test_mpi_that_sees_one_process_of_one() -> None:
    line = compare_with_mpi(replace(TASK, launcher="slurm"), (0, 1))
    assert line == "MPI sees process 0 of 1 where slurm started 2 of 4; start the ranks with srun --mpi=pmix"
    assert compare_with_mpi(TASK, (2, 4)) is None
    assert "not installed" in str(compare_with_mpi(TASK, None))


def test_the_first_rank_that_mpi_sees_elsewhere_is_named() -> None:
    facts = [replace(it, mpi=[it.process, 4]) for it in facts_of(2, 2)]
    assert find_mpi_disagreement(facts, "slurm", "parallel.reduce_with=mpi") is None
    line = str(find_mpi_disagreement(changed(facts, 3, mpi=[0, 1]), "slurm", "parallel.reduce_with=mpi"))
    assert line.startswith("parallel.reduce_with=mpi: MPI sees process 0 of 1 where slurm started 3 of 4;")


def test_slurms_own_count() -> None:
    assert read_slurm_rank_and_size(srun(2, 1, 0)) == (2, 4)
    assert read_slurm_rank_and_size(batch_script()) is None
    assert read_slurm_rank_and_size({}) is None


def test_a_launcher_inside_a_step_of_other_tasks() -> None:
    """torchrun once per node is as it should be; torchrun in each of 8 tasks on 2 nodes is not."""
    once = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert compare_with_slurm(TASK, once) is None
    assert compare_with_slurm(TASK, srun(2, 1, 0)) is None
    assert "8 tasks on 2 nodes where torchrun counts 4" in str(
        compare_with_slurm(TASK, {**once, "SLURM_STEP_NUM_TASKS": "8"})
    )
    assert compare_with_slurm(replace(TASK, launcher="slurm"), {**once, "SLURM_STEP_NUM_TASKS": "8"}) is None


def test_srun_without_mpi() -> None:
    assert find_missing_mpi("slurm", srun(0, 0, 0)) == "srun gave these processes no MPI; use srun --mpi=pmix"
    assert find_missing_mpi("slurm", {**srun(0, 0, 0), "PMIX_RANK": "0"}) is None
    assert find_missing_mpi("torchrun", srun(0, 0, 0)) is None
