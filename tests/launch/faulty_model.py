"""A user's own small model that does, at a chosen moment of a chosen rank, what the environment asks for.

FAULTS="1:train:3:raise 0:save:1:hold": rank 1 raises in its third forward of training, and rank 0 holds in its first
checkpoint until the file `go` appears (listen: until it has been asked to stop; eat: takes memory without end; memory:
the same, and soon gets no more; poison: one of its weights is NaN from now on; nan: its answer is NaN, once; flip:
a bit of a weight flips; nap2.5: sleeps that many seconds; pause2.5: is stopped by SIGSTOP for that long; disk: a system
call does not return; full2.5: writes fail for that long).
Every fault happens once in the life of FAULT_FOLDER, where a file with its name says that it did.

With STEP_SECONDS, a forward of training takes so long until FAULT_FOLDER has a file `fast`, and a file `1.save` there
has rank 1 do in its next checkpoint what the file says, once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.checkpoint.save import save_step
from hpc_train.data.loader import Loader
from hpc_train.errors import UserError
from hpc_train.models.registry import register
from hpc_train.resilience.chaos import hold_interpreter_lock
from hpc_train.training import assemble

_moments: Counter[str] = Counter()


def reach(moment: str, model: Faulty | None = None) -> None:
    """Make the faults that are wanted at this moment; called at every moment at which there may be one."""
    _moments[moment] += 1
    name = f"{dist.get_rank()}:{moment}:{_moments[moment]}"
    for fault in os.environ.get("FAULTS", "").split():
        done = Path(os.environ["FAULT_FOLDER"]) / fault
        if fault.startswith(f"{name}:") and not done.exists():
            done.touch()
            act(fault.rsplit(":", 1)[1], model)
    if "STEP_SECONDS" in os.environ:
        folder = Path(os.environ["FAULT_FOLDER"])
        if moment == "train" and not (folder / "fast").exists():
            time.sleep(float(os.environ["STEP_SECONDS"]))
        order = folder / f"{dist.get_rank()}.{moment}"
        if order.exists():
            action = order.read_text()
            order.unlink()
            act(action, model)


def act(action: str, model: Faulty | None) -> None:
    if action == "nan":
        assert model is not None
        model.spoils = True
        return
    if action == "flip":
        assert model is not None
        flip_lowest_bit(model.out.weight)
        return
    if action == "raise":
        raise RuntimeError("a fault of the user's model")
    if action == "warn":
        logging.getLogger("hpc_train.models").warning("rank %d has seen something", dist.get_rank())
        return
    if action == "poison":
        assert model is not None
        model.out.weight.data[0, 0] = float("nan")
        return
    if action == "refuse":
        raise UserError("model.args.size=0: the user's model needs at least 1")
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if action == "gil":
        hold_interpreter_lock()
    if action.startswith("nap"):
        time.sleep(float(action.removeprefix("nap")))
        return
    if action.startswith("pause"):
        seconds = float(action.removeprefix("pause"))
        subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"]).wait()
        return
    if action == "loop":
        while True:
            pass
    if action == "exit":
        os._exit(3)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "segfault":
        ctypes.string_at(0)
    if action == "abort":
        os.abort()
    if action == "disk":
        wait_in_the_kernel()
    if action.startswith("full"):
        fail_writes(float(action.removeprefix("full")))
        return
    if action == "memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (1 << 28)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    if action in ("eat", "memory"):
        eaten = [bytearray(b"x") * (1 << 26) for _ in range(1 << 10)]
        assert not eaten, "nothing bounds the memory of this process"
    go = Path(os.environ["FAULT_FOLDER"]) / "go"
    entrypoint = sys.modules["__main__"]
    while not (entrypoint._stop_request.requested if action == "listen" else go.exists()):  # type: ignore[attr-defined]
        time.sleep(0.01)


def flip_lowest_bit(tensor: Tensor) -> None:
    """Flip the lowest bit of the mantissa of the largest number: too little for a loss to show."""
    numbers = tensor.data.view(-1)
    numbers.view(torch.int32)[numbers.abs().argmax()] ^= 1


def wait_in_the_kernel() -> None:
    """Stay in a system call that only SIGKILL ends: vfork(2), whose child does not end."""
    libc = ctypes.PyDLL(None)  # without giving up the lock of the interpreter: the child shares this memory
    if libc.vfork() == 0:
        libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: the child goes with this process
        libc.sleep(10_000)


def fail_writes(seconds: float) -> None:
    """Make every write to a file of this process fail (EFBIG, as with a quota) for so long."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, unlimited))
    timer.daemon = True
    timer.start()


@register("faulty")
class Faulty(nn.Module):
    """Logits of the next byte from this one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        reach("build")
        self.spoils = False
        self.embed = nn.Embedding(256, width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        reach("train" if torch.is_grad_enabled() else "eval", self)
        logits: Tensor = self.out(self.drop(self.embed(tokens)))
        if self.spoils:
            self.spoils = False
            return logits * float("nan")
        return logits


_assemble = Loader._assemble
_resume = assemble.resume_from_checkpoint
_write_shard = save_step.write_shard


def _resume_with_faults(*arguments: Any) -> Any:
    resumed = _resume(*arguments)
    if resumed is not None:
        reach("load")
    return resumed


def _write_shard_with_faults(*arguments: Any) -> Any:
    reach("save")
    return _write_shard(*arguments)


def _assemble_with_faults(*arguments: Any) -> Any:
    reach("data")
    return _assemble(*arguments)


Loader._assemble = _assemble_with_faults  # type: ignore[method-assign]
save_step.write_shard = _write_shard_with_faults
assemble.resume_from_checkpoint = _resume_with_faults
