"""conf/container: what the ranks of a batch job run in."""

from __future__ import annotations

from hpc_train.config.schema import schema, setting


@schema
class ContainerConfig:
    """An image for the ranks. The batch script and Slurm's commands stay outside of it."""

    kind: str = setting(default="none", choices=("none", "apptainer", "pyxis"))
    """apptainer: `apptainer exec` around each rank; pyxis: srun's --container options (Enroot)."""
    image: str | None = None
    """A file (SIF; squashfs of Enroot) that the nodes see, or the address of an image, such as docker://..."""
    command: str = setting(default="apptainer", choices=("apptainer", "singularity"))
    """Program that starts containers, for kind=apptainer."""
    python: str = "python3"
    """Python inside of the image; hpc_train is found there, or in the snapshot of the code."""
    gpu: str = setting(default="auto", choices=("auto", "nvidia", "amd", "none"))
    """apptainer: whose libraries come along (--nv, --rocm); auto: as cluster.gpu.name says."""
    read: list[str] = setting(default=[])
    """More files or folders that ranks read, under the same path inside; /outside:/inside for another one."""
    write: list[str] = setting(default=[])
    """The same, to write to as well."""
    env: list[str] = setting(default=[])
    """More variables whose value outside wins over the image's; settings of NCCL, OpenMP and the like do anyway."""
