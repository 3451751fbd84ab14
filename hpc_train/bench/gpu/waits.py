"""Count how often a step makes the host wait for the device: by torch's warnings on a GPU, by operators on a CPU.

While the host waits it queues no kernels, and afterwards the device waits for the host. The trainer waits once a step,
for the step's numbers (training.numerics.step_numbers); a technique that adds a wait shows here, if a layout has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpc_train._torch.observation import TorchDispatchMode
from hpc_train.bench.gpu.gpu_table import Row
from hpc_train.bench.gpu.step_sides import MAX_NORM, make_batch, make_config, make_engine
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.training.numerics.step_numbers import read_step_numbers

LAYOUTS = {
    "ddp": (),
    "fsdp": ("parallel=fsdp",),
    "fsdp, activations offloaded": ("parallel=fsdp", "parallel.recompute.offload=true"),
    "fsdp, optimizer offloaded": ("parallel=fsdp", "parallel.offload.optimizer=cpu"),
    "fp8": ("precision=fp8",),
    "muon": ("optim=muon", "parallel=fsdp"),
}
_ASKING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount")
"""Operators whose result the host needs."""


def measure_waits(world: World, quick: bool) -> Iterator[Row]:
    """Count the waits of a step after the first two, in small layouts of one rank."""
    on_gpu = world.device.type == "cuda"
    for name, overrides in LAYOUTS.items():
        if "offload=true" in str(overrides) and not on_gpu:
            continue  # refused: activations are there already
        config = make_config("llama_1b", True, *overrides)
        step = _make_step(config, world)
        for _ in range(2):  # a wait that only the first steps have does not count
            step()
        waits = _count_on_gpu(step) if on_gpu else _count_operators(step)
        description = "; ".join(f"{count} x {what}" for what, count in waits.items())
        yield Row(
            f"{name}: waits in a step", sum(waits.values()), "", description or "no operator that asks for a value"
        )


def _make_step(config: RunConfig, world: World) -> Callable[[], None]:
    engine, batch = make_engine(config, world), make_batch(config, world.device)

    def step() -> None:
        read_step_numbers(engine.forward_backward(batch), engine.clip(MAX_NORM))
        engine.update(config.optim.lr)

    return step


def _count_on_gpu(step: Callable[[], None]) -> dict[str, int]:
    """Count what torch warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{warning.filename.rpartition('/')[2]}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    ]
    return {place: places.count(place) for place in dict.fromkeys(places)}


class _CountAsking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _ASKING:
            self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _count_operators(step: Callable[[], None]) -> dict[str, int]:
    with _CountAsking() as counted:
        step()
    counts: dict[str, int] = counted.found
    return counts
