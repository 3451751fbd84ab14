"""Which variables of the submitting shell reach a job."""

from __future__ import annotations

import pytest

from hpc_train.errors import UserError
from hpc_train.launch.slurm.job_environment import job_environment

SHELL = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "SLURM_CONF": "/etc/slurm.conf",
    "BASH_FUNC_module%%": "() { :; }",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
}
DROPPED = {
    "SLURM_JOB_ID": "7",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xF",
    "SBATCH_ACCOUNT": "other",
    "SLURM_CPUS_PER_TASK": "4",
    "PMI_RANK": "3",
    "PMIX_RANK": "3",
    "HPC_TRAIN_ATTEMPT": "4",
    "SUBMITIT_EXECUTOR": "local",
    "WANDB_API_KEY": "s",
    "HF_TOKEN": "s",
    "NCCL_SECRET": "s",
    "AWS_SECRET_ACCESS_KEY": "s",
    "MY_APP": "1",
}


def test_the_usual_ones_go_along_and_nothing_else() -> None:
    assert job_environment([], SHELL | DROPPED) == SHELL


def test_more_go_along_by_name_or_pattern() -> None:
    assert job_environment(["MY_*"], SHELL | DROPPED) == SHELL | {"MY_APP": "1"}
    assert job_environment(["WANDB_API_KEY"], SHELL | DROPPED) == SHELL | {"WANDB_API_KEY": "s"}
    assert job_environment(["NONE_OF_*"], SHELL) == SHELL


@pytest.mark.parametrize("name", ["A=b", "", "a b", "9", "A\nB", "$(x)"])
def test_values_are_no_names(name: str) -> None:
    with pytest.raises(UserError, match="is not the name of a variable"):
        job_environment([name], SHELL)


def test_a_name_that_is_not_set_is_said() -> None:
    with pytest.raises(UserError, match="MISSING is not set here"):
        job_environment(["MISSING"], SHELL)
