"""Python, torch, mpi4py and h5py: what is installed and what it can do."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType

from hpc_train.doctor.finding import Finding, bad, ok, warn
from hpc_train.doctor.tools import Run, run

LEAST, BELOW = (2, 11), (2, 14)
"""Of torch: what pyproject.toml asks for."""


def software() -> Iterator[Finding]:
    """Every check of this file."""
    import torch

    yield python(sys.version_info[:3])
    yield torch_build(torch.__version__, torch.version.cuda, torch.version.hip)
    yield mpi(find_spec("mpi4py") is not None, run)
    yield hdf5(importlib.import_module)


def python(version: tuple[int, int, int]) -> Finding:
    """From 3.11 on."""
    text = f"Python {'.'.join(map(str, version))}, {platform.machine()}"
    return ok("python", text) if version >= (3, 11) else bad("python", text, "hpc_train needs Python 3.11 or newer")


def torch_build(version: str, cuda: str | None, hip: str | None) -> Finding:
    """The version, and what it computes on."""
    kind = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    text = f"torch {version}, {kind}"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if LEAST <= numbers < BELOW:
        return ok("torch", text)
    wanted = f">={'.'.join(map(str, LEAST))},<{'.'.join(map(str, BELOW))}"
    return warn("torch", text, f"hpc_train is tested with torch{wanted}: pip install 'torch{wanted}'")


_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__, "over", MPI.Get_library_version().split("\\n")[0].split(",")[0].strip(" \\0"))
"""


def mpi(installed: bool, ask: Run) -> Finding:
    """mpi4py is optional; one that does not load its library is broken.

    Asked in a process of its own: a library of the wrong kind may end it, and MPI starts once only in this one.
    """
    if not installed:
        return ok("mpi", "mpi4py is not installed; needed for parallel=server and parallel.reduce_with=mpi only")
    code, said = ask([sys.executable, "-c", _MPI])
    if code == 0:
        return ok("mpi", f"mpi4py {said}")
    advice = "load the module of the MPI that mpi4py was built with, or: pip install --no-binary mpi4py mpi4py"
    return bad("mpi", f"mpi4py does not load its MPI library: {said[-160:]}", advice)


def hdf5(load: Callable[[str], ModuleType]) -> Finding:
    """h5py, and whether its HDF5 is parallel, which is not needed: every rank writes its own file."""
    try:
        h5py = load("h5py")
    except ImportError as error:
        return bad("hdf5", f"h5py does not load: {' '.join(str(error).split())[:120]}", "pip install h5py")
    parallel = "parallel" if h5py.get_config().mpi else "serial, which is all that is needed"
    return ok("hdf5", f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {parallel}")
