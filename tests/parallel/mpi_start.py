"""Run a function on ranks that a real mpirun starts, forked from this process so that none of them imports torch anew.

mpirun starts a tiny process a rank. It hands its environment to this process, whose fork is then the rank, and waits
for its end.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n")
STAND_IN = """
import json, os, socket, sys
place = socket.socket(socket.AF_UNIX)
place.connect(sys.argv[1])
place.sendall(json.dumps(dict(os.environ)).encode() + b"\\n")
sys.exit(0 if place.recv(1) == b"0" else 1)
"""


def run_mpi_ranks(function: Callable[..., None], ranks: int, *args: Any, timeout: float = 280) -> None:
    """Call `function(*args)` on `ranks` ranks of one mpirun. What one of them raises is raised here."""
    context = get_context("fork")
    processes: list[ForkProcess] = []
    with tempfile.TemporaryDirectory(prefix="mpi-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(ranks)
        listener.settimeout(timeout)
        command = [*MPIRUN, str(ranks), sys.executable, "-I", "-S", "-c", STAND_IN, f"{folder}/s"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
            try:
                for _ in range(ranks):
                    stand_in, _ = listener.accept()
                    with stand_in:
                        error = Path(folder) / f"error-{len(processes)}"
                        processes.append(context.Process(target=_run_rank, args=(stand_in, error, function, args)))
                        processes[-1].start()
                _, said = job.communicate(timeout=timeout)
            finally:
                job.kill()
                for process in processes:
                    process.kill()
                    process.join()
        errors = [file.read_text() for file in sorted(Path(folder).glob("error-*"))]
        assert job.returncode == 0, "\n".join([*errors, said])


def _run_rank(stand_in: socket.socket, error: Path, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()
    ended = b"1"
    try:
        with stand_in.makefile("r") as lines:
            os.environ.update(json.loads(lines.readline()))
        torch.set_num_threads(1)
        function(*args)
        from mpi4py import MPI

        MPI.Finalize()
        ended = b"0"
    except BaseException:
        error.write_text(traceback.format_exc())
    finally:
        stand_in.sendall(ended)
        os._exit(0)  # skip the exit handlers of the parent's copy
