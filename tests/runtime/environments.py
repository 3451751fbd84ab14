"""Environments as launchers set them: recorded from each, and reduced to the variables by which ranks differ."""

from __future__ import annotations


def srun(process: int, node: int, local: int) -> dict[str, str]:
    """Slurm 22.05: `srun -N2 --ntasks-per-node=2`."""
    return {
        "SLURMD_NODENAME": f"node{node + 3}",
        "SLURM_GTIDS": f"{2 * node},{2 * node + 1}",
        "SLURM_JOB_ID": "13",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_LOCALID": str(local),
        "SLURM_NNODES": "2",
        "SLURM_NODEID": str(node),
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": str(process),
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }


def batch_script() -> dict[str, str]:
    """Slurm 22.05: the script of `sbatch -N2 --ntasks-per-node=2`; process 0, but no step."""
    return {
        "SLURMD_NODENAME": "node3",
        "SLURM_GTIDS": "0",
        "SLURM_JOB_ID": "13",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }


def pty_shell() -> dict[str, str]:
    """Slurm 22.05: `srun --pty bash`."""
    return {
        "SLURMD_NODENAME": "node3",
        "SLURM_JOB_ID": "14",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_PTY_PORT": "44937",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
    }


def submitit_local(process: int) -> dict[str, str]:
    """submitit 1.5: a task of its local executor with tasks_per_node=2."""
    return {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_GLOBALID": str(process),
        "SUBMITIT_LOCAL_JOB_ID": "4435",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_LOCALID": str(process),
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_NTASKS": "2",
    }


def torchrun(process: int, restarts: int = 0) -> dict[str, str]:
    """torch 2.13: `torchrun --nnodes 2 --nproc-per-node 2`."""
    return {
        "GROUP_RANK": str(process // 2),
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_RANK": str(process % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node3",
        "MASTER_PORT": "41391",
        "RANK": str(process),
        "ROLE_RANK": str(process),
        "ROLE_WORLD_SIZE": "4",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": "9b83babb",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "4",
    }


def open_mpi(process: int, size: int, local: int, local_size: int) -> dict[str, str]:
    """Open MPI 4.1: `mpirun`; OMPI_COMM_WORLD_NODE_RANK counts the processes of a node."""
    return {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_MCA_ess_base_jobid": "1677983745",
        "OMPI_UNIVERSE_SIZE": str(size),
        "PMIX_NAMESPACE": "1677983745",
        "PMIX_RANK": str(process),
    }


def mpich(process: int) -> dict[str, str]:
    """MPICH 4's hydra: `mpiexec -n 4 -ppn 2`."""
    return {
        "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(process % 2),
        "PMI_FD": "9",
        "PMI_RANK": str(process),
        "PMI_SIZE": "4",
    }
