"""Choose the variables that go along with a job, by an allow-list: neither a secret nor a variable of another job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from hpc_train.config.checks.secret_variables import is_secret_name
from hpc_train.errors import UserError

ALLOWED_VARIABLES = (
    # who and where
    *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM"),
    *("SCRATCH", "WORK", "PROJECT", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    # Python, its environments, and what modules load
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "MANPATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH"),
    *("MODULE*", "LMOD_*", "LOADEDMODULES", "_LMFILES_*", "_ModuleTable*", "__LMOD_*", "BASH_ENV", "EBROOT*"),
    *("EBVERSION*", "BASH_FUNC_module%%", "BASH_FUNC_ml%%", "BASH_FUNC__module_raw%%", "BASH_FUNC_switchml%%"),
    # libraries that take their settings from there
    *("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "ROCM_PATH", "ROCM_HOME", "MPI_HOME", "HDF5_*", "HF_HOME", "HF_HUB_CACHE"),
    *("NCCL_*", "RCCL_*", "GLOO_*", "UCX_*", "FI_*", "MPICH_*", "OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GOMP_*"),
    *("TORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "PYTORCH_*", "HPC_TRAIN_*"),
    # how Slurm's clients find their cluster
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"),
)
"""Names and patterns of what goes along; launch.export adds to it."""
_RANK_VARIABLES = ("HPC_TRAIN_ATTEMPT", "HPC_TRAIN_RENDEZVOUS", "SUBMITIT_*")
"""Names and patterns of what launchers set for one rank, which a job that is submitted from there must not get."""
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?%]*")


def job_environment(export: Sequence[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of `env` that a job gets.

    export: launch.export, more names or patterns; only they can name a secret. Raises UserError for what is not a
    name, or is not set here: the job would miss it.
    """
    chosen = {name: value for name, value in env.items() if _is_allowed(name)}
    for pattern in export:
        if not _VARIABLE_PATTERN.fullmatch(pattern):
            raise UserError(f"launch.export: {pattern!r} is not the name of a variable; give names, not values")
        matching = {name: value for name, value in env.items() if fnmatchcase(name, pattern)}
        if not matching and not set("*?") & set(pattern):
            raise UserError(f"launch.export: {pattern} is not set here; set it, or leave it out")
        chosen |= matching
    return chosen


def _is_allowed(name: str) -> bool:
    if is_secret_name(name) or any(fnmatchcase(name, pattern) for pattern in _RANK_VARIABLES):
        return False
    return any(fnmatchcase(name, pattern) for pattern in ALLOWED_VARIABLES)
