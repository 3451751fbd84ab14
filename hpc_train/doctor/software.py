"""Check the installed software: Python, torch, MPI, HDF5, the cluster's programs, and environment variables.

Each check is a function from what it looks at to a Finding; the generators at the top of each part run all of
them.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from types import ModuleType

from hpc_train._torch.versions import OLDEST_TESTED, describe_untested_torch, release_numbers
from hpc_train.doctor.findings import Finding, fail_check, pass_check, warn_check
from hpc_train.errors import UserError
from hpc_train.placement.communication_environment import find_harmful_variables
from hpc_train.runtime.identity import find_local_address, list_interfaces

FindProgram = Callable[[str], str | None]
"""Returns the path of a program, None if it is not on PATH."""
RunCommand = Callable[[list[str]], tuple[int, str]]
"""Runs a command and returns (exit code, output)."""


def check_software() -> Iterator[Finding]:
    """Run the checks of Python and its packages."""
    import torch

    yield check_python(sys.version_info[:3])
    yield check_torch(torch.__version__, torch.version.cuda, torch.version.hip)
    yield check_mpi(find_spec("mpi4py") is not None, run_command)
    yield check_hdf5(importlib.import_module)


def check_python(version: tuple[int, int, int]) -> Finding:
    """Check that Python is 3.11 or newer."""
    text = f"Python {'.'.join(map(str, version))}, {platform.machine()}"
    return (
        pass_check("python", text)
        if version >= (3, 11)
        else fail_check("python", text, "hpc_train needs Python 3.11 or newer")
    )


def check_torch(version: str, cuda: str | None, hip: str | None) -> Finding:
    """Check the version of torch, and report its devices."""
    kind = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    text = f"torch {version}, {kind}"
    if release_numbers(version) < OLDEST_TESTED:
        oldest = ".".join(map(str, OLDEST_TESTED))
        return fail_check("torch", text, f"hpc_train needs torch {oldest} or newer: pip install 'torch>={oldest}'")
    if warning := describe_untested_torch(version):
        return warn_check("torch", text, warning)
    return pass_check("torch", text)


_MPI_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__, "over", MPI.Get_library_version().split("\\n")[0].split(",")[0].strip(" \\0"))
"""


def check_mpi(installed: bool, ask: RunCommand) -> Finding:
    """Check that mpi4py, which is optional, loads its library if it is installed.

    This runs in a process of its own: a library of the wrong kind may end the process by a signal, which no exception
    handler sees, and MPI can be started only once in a process.
    """
    if not installed:
        return pass_check(
            "mpi", "mpi4py is not installed; needed for parallel=server and parallel.reduce_with=mpi only"
        )
    code, output = ask([sys.executable, "-c", _MPI_PROGRAM])
    if code == 0:
        return pass_check("mpi", f"mpi4py {output}")
    advice = "load the module of the MPI that mpi4py was built with, or: pip install --no-binary mpi4py mpi4py"
    return fail_check("mpi", f"mpi4py does not load its MPI library: {output[-160:]}", advice)


def check_hdf5(load: Callable[[str], ModuleType]) -> Finding:
    """Check h5py. Parallel HDF5 is reported but not needed: every rank writes its own file."""
    try:
        h5py = load("h5py")
    except ImportError as error:
        return fail_check("hdf5", f"h5py does not load: {' '.join(str(error).split())[:120]}", "pip install h5py")
    parallel = "parallel" if h5py.get_config().mpi else "serial, which is all that is needed"
    return pass_check("hdf5", f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {parallel}")


SLURM_PROGRAMS = ("sbatch", "srun", "squeue", "sinfo", "sacct", "scontrol")
_TIMEOUT_SECONDS = 20.0


def check_tools(env: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Run the checks of the cluster's programs."""
    env = os.environ if env is None else env
    yield check_slurm_client(shutil.which)
    if shutil.which("scontrol"):
        yield check_controller(run_command)
    yield check_lustre(shutil.which)
    yield check_modules(env)


def run_command(command: list[str]) -> tuple[int, str]:
    """Run a command that may hang; the exit code is then 124."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {_TIMEOUT_SECONDS:.0f} s"
    except OSError as error:
        return 127, error.strerror or "cannot be run"
    return done.returncode, " ".join((done.stderr + done.stdout).split())


def check_slurm_client(which: FindProgram) -> Finding:
    """Check the Slurm programs that `submit` and `status` call."""
    installed = [name for name in SLURM_PROGRAMS if which(name)]
    missing = [name for name in SLURM_PROGRAMS if name not in installed]
    if not installed:
        return pass_check("slurm", "no Slurm here; launch=local runs on this machine")
    if missing:
        advice = "submit and status need them all: add Slurm's bin folder to PATH, or load its module"
        return warn_check("slurm", f"{', '.join(installed)}, but no {', '.join(missing)}", advice)
    return pass_check("slurm", ", ".join(installed))


def check_controller(ask: RunCommand) -> Finding:
    """Check that slurmctld answers."""
    code, output = ask(["scontrol", "ping"])
    if code == 0 and " is UP" in output:
        return pass_check("slurmctld", output[:120])
    advice = "jobs cannot be submitted now: look at `scontrol ping` and munge, or ask the site"
    return warn_check("slurmctld", f"does not answer: {output[:120]}", advice)


def check_lustre(which: FindProgram) -> Finding:
    """Check lfs, which stripes checkpoints on Lustre."""
    if which("lfs"):
        return pass_check("lfs", "Lustre's lfs is here")
    return pass_check("lfs", "no lfs: checkpoints on Lustre, if there are any, get the folder's own striping")


def check_modules(env: Mapping[str, str]) -> Finding:
    """Report environment modules, and which are loaded."""
    kind = "Lmod" if "LMOD_VERSION" in env else "environment modules" if "MODULESHOME" in env else None
    if kind is None:
        return pass_check("modules", "no environment modules")
    loaded = env.get("LOADEDMODULES", "").replace(":", ", ") or "none"
    return pass_check("modules", f"{kind}; loaded: {loaded}")


def check_environment(
    env: Mapping[str, str], host: str, nodes: int, wanted: str | None, local: int
) -> Iterator[Finding]:
    """Run the checks of network settings and threads.

    wanted: cluster.fabric.interface. nodes: of the job. local: ranks of this node.
    """
    yield check_interface(host, nodes, wanted)
    yield from check_chosen_interface(env, list_interfaces())
    yield from check_harmful_variables(env, local)
    yield from check_threads(env, local)


def check_interface(host: str, nodes: int, wanted: str | None) -> Finding:
    """Check the interface on which ranks will open sockets."""
    try:
        address, name = find_local_address(host, nodes, wanted)
    except UserError as error:
        return fail_check("interface", str(error), "see `ip -4 address` for what this host has")
    return pass_check(
        "interface", f"{name}, {address}" + ("" if wanted or nodes > 1 else " (one node needs no network)")
    )


def check_chosen_interface(env: Mapping[str, str], addresses: Mapping[str, str]) -> Iterator[Finding]:
    """Check that interfaces chosen by the user exist. addresses: this host's interfaces -> IPv4 address."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = env.get(name, "")
        wanted = [part for part in value.lstrip("=").split(",") if part]
        if not wanted or value.startswith("^"):  # ^ excludes interfaces
            continue
        # gloo takes whole names, NCCL prefixes unless there is an = before them.
        exact = name.startswith("GLOO") or value.startswith("=")
        matches = [
            interface
            for interface in addresses
            if any(interface == part if exact else interface.startswith(part) for part in wanted)
        ]
        if not matches:
            text = f"{name}={value}: this host has {', '.join(sorted(addresses))}"
            yield fail_check("environment", text, f"unset {name}, or name the network with cluster.fabric.interface")


def check_harmful_variables(env: Mapping[str, str], local: int) -> Iterator[Finding]:
    """Check for variables left over from an old script or another machine."""
    variables = find_harmful_variables(env, local)
    for variable in variables:
        yield warn_check("environment", f"{variable.name}={variable.value} is set", variable.why)
    if not variables:
        yield pass_check("environment", "no variable that is known to do harm")


def check_threads(env: Mapping[str, str], local: int) -> Iterator[Finding]:
    """Check OMP_NUM_THREADS: if it is unset, every rank starts a thread for each core."""
    value = env.get("OMP_NUM_THREADS", "")
    if value and not value.split(",")[0].isdecimal():
        yield fail_check("threads", f"OMP_NUM_THREADS={value} is not a number", "unset it, or set launch.threads")
    elif not value and local > 1:
        text = f"OMP_NUM_THREADS is not set for {local} ranks of a node"
        yield pass_check("threads", f"{text}; `train` shares the node's cores out, other programs may not")
