"""Record what this rank spent the time of each step on, for `hpc-train report`, `top` and `status`.

The clock of the world (step_clock.py) measures the parts of a step: marks set by the loop and by hooks of the model's
forward, and the time in which a collective blocked this rank. A record also has the stall of saves, memory, processor
time and the node's counters. Nothing here changes what is computed or waits for a device.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpc_train._torch.observation import watch_waits
from hpc_train._torch.tensors import tree_leaves
from hpc_train.cluster.local_gpus import load_nvml
from hpc_train.interfaces import Engine, World
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.step_clock import ReadTimes, StepClock, StepPart
from hpc_train.training.records.step_records import RecordSum, StepRecordFile

_SAMPLE_SECONDS = 2.0
_NODES_PER_COLLECTIVE = 20
"""Cost of starting a collective, in units of an operation: fully_shard copies in and out, makes views and runs hooks.
With next to no data, 31 collectives added 17 to 24 ms to a step whose 650 operations took 6."""
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


class _Reading(NamedTuple):
    """Clocks and counters of this process at one moment."""

    time: float
    """time.time()."""
    clock: float
    """Seconds in all phases so far. Not a clock of its own: if this process lost its processor between two reads, the
    phases of a step would add up to more than the step."""
    processor: float
    """Seconds of processor time, all threads."""
    phases: dict[Phase, float]
    """Seconds in each phase so far."""
    faults: int
    """Major page faults so far."""


class _Unfinished(NamedTuple):
    """The record of a step without the times of its parts."""

    values: dict[str, Any]
    read_times: ReadTimes
    micro_batches: int


class StepRecorder:
    """Records the steps of one rank. `begin` ends the record of the step before."""

    def __init__(self, engine: Engine, world: World, heartbeat: Heartbeat, path: Path, compiled: bool) -> None:
        """path: the file of this node. compiled: see _torch.observation.watch_waits."""
        self._clock, self._heartbeat, self._device = world.clock, heartbeat, world.device
        self._file = StepRecordFile(path, world.rank)
        self._sum = RecordSum(lambda record: self._file.append(record, time.monotonic()))
        self._counters = NodeCounters(world.device)
        self._operations = OperationCount(engine.parts, world.device)
        self._unhook = list(watch_forward(engine.parts, self._clock))
        self._compiled, self._unwatch = compiled, watch_waits(self._clock, world.device, compiled)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._step, self._tokens, self._micro_batches = 0, 0, 1
        self._started: _Reading | None = None
        self._unfinished: _Unfinished | None = None
        """The record of a step whose device has yet to say how long its parts took."""

    def begin(self) -> None:
        """Begin a step: everything up to the next call belongs to it."""
        now = self._read()
        self._end_record(now)
        if self._operations.measure():
            now = self._read()  # what that took belongs to no step
        self._started = now
        self._clock.begin()

    def end(self, step: int, tokens: int, micro_batches: int) -> None:
        """End the measured part of a step. step: updates made so far. tokens: of the whole job."""
        self._clock.end()
        self._step, self._tokens, self._micro_batches = step, tokens, micro_batches

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Leave torch as it was while the code inside runs, for comparisons without a recorder."""
        self._unwatch()
        try:
            yield
        finally:
            self._unwatch = watch_waits(self._clock, self._device, self._compiled)

    def close(self) -> None:
        """Write what waits, and measure no more."""
        self._end_record(self._read())
        last, self._unfinished = self._unfinished, None
        self._finish(last)
        self._sum.end()
        for undo in (*self._unhook, self._unwatch):
            undo()
        self._counters.close()
        self._file.close()
        os.close(self._statm)

    def _read(self) -> _Reading:
        """Read the clocks and counters of this process."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        phases = self._heartbeat.seconds()
        return _Reading(time.time(), sum(phases.values()), time.process_time(), phases, faults)

    def _end_record(self, now: _Reading) -> None:
        """Complete the record of a step that ends at the reading `now`.

        On a GPU the clock's times come a step later, so that nothing waits for the device: the record is then finished
        with the next one.
        """
        started, self._started = self._started, None
        if started is None or not self._step:
            return
        values: dict[str, Any] = {
            "step": self._step,
            "steps": 1,
            "time": started.time,
            "total": now.clock - started.clock,
            "data": now.phases.get(Phase.DATA, 0.0) - started.phases.get(Phase.DATA, 0.0),
            "save": now.phases.get(Phase.SAVE, 0.0) - started.phases.get(Phase.SAVE, 0.0),
            "evaluate": now.phases.get(Phase.EVALUATE, 0.0) - started.phases.get(Phase.EVALUATE, 0.0),
            "cpu": now.processor - started.processor,
            "tokens": self._tokens,
            "major_faults": now.faults - started.faults,
            "resident": int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE_MIB,  # the second number is in pages
            **self._read_device_memory(),
            **self._counters.latest,
        }
        ended = _Unfinished(values, self._clock.take(), self._micro_batches)
        if not self._clock.late:
            self._finish(ended)
            return
        self._finish(self._unfinished)
        self._unfinished = ended

    def _finish(self, record: _Unfinished | None) -> None:
        """Add the times of its parts to a record, and write it."""
        if record is None:
            return
        values = record.values
        if (times := record.read_times()) is not None:
            for part, name in _PARTS.items():
                values[name] = times.seconds[part]
            for part, name in _BLOCKED.items():
                values[name] = times.blocked[part]
            values["blocked_rest"] = times.blocked[StepPart.REST] + times.blocked[StepPart.UPDATE]
            values["waits"], values["collectives"] = times.waits, times.collectives
            values["launch"] = self._operations.estimate(record.micro_batches, times.collectives)
        self._sum.add(values)

    def _read_device_memory(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        allocated = torch.cuda.max_memory_allocated(self._device) / 2**20
        return {"allocated": allocated, "reserved": torch.cuda.memory_reserved(self._device) / 2**20}


_PARTS = {
    StepPart.FORWARD: "forward",
    StepPart.BACKWARD: "backward",
    StepPart.CLIP: "clip",
    StepPart.UPDATE: "update",
}
_BLOCKED = {
    StepPart.FORWARD: "blocked_forward",
    StepPart.BACKWARD: "blocked_backward",
    StepPart.CLIP: "blocked_clip",
}


def watch_forward(parts: list[nn.Module], clock: StepClock) -> Iterator[Callable[[], None]]:
    """Mark begin and end of each forward; yields functions that undo it."""
    for part in parts:
        # First of all hooks: fully_shard gathers parameters in one, which belongs to the forward.
        before = part.register_forward_pre_hook(lambda *_: clock.enter(StepPart.FORWARD), prepend=True)
        after = part.register_forward_hook(lambda *_: clock.enter(StepPart.BACKWARD))
        yield before.remove
        yield after.remove


class OperationCount:
    """Estimates how long starting the operations of a step takes, without their work.

    The autograd graph of one forward has a node for most operations; a small model of known size says what one node
    costs on this machine, forward and backward together. A compiled region counts as one. Collectives count, too.
    """

    def __init__(self, parts: list[nn.Module], device: torch.device) -> None:
        self._device = device
        self._nodes = 0
        self._seconds_per_node: float | None = None
        self._hooks = [part.register_forward_hook(self._count) for part in parts]
        self._begun = 0
        self._counted: set[int] = set()
        """Identity of the parts that have been counted."""

    def measure(self) -> bool:
        """Measure what a node costs, once, when a first step has been counted: that takes 10 ms, and returns True."""
        self._begun += 1
        if self._begun != 3:  # the two steps that compile and warm up are over then
            return False
        for hook in self._hooks:
            hook.remove()
        self._seconds_per_node = measure_node_seconds(self._device)
        return True

    def estimate(self, micro_batches: int, collectives: int) -> float:
        """Return the seconds of one step; NaN until they are known."""
        if self._seconds_per_node is None or not self._nodes:
            return float("nan")
        return (self._nodes * micro_batches + _NODES_PER_COLLECTIVE * collectives) * self._seconds_per_node

    def _count(self, part: nn.Module, inputs: Any, output: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if roots and id(part) not in self._counted:
            self._counted.add(id(part))
            self._nodes += count_nodes(roots)


def count_nodes(roots: list[Any]) -> int:
    """Count the nodes of an autograd graph."""
    visited, waiting = set(roots), list(roots)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in visited:
                visited.add(node)
                waiting.append(node)
    return len(visited)


def measure_node_seconds(device: torch.device) -> float:
    """Return the seconds that an operation takes whose work is next to nothing, forward and backward together.

    A GPU is not waited for: the host takes as long as this to give it the work.
    """
    layers, rounds = 20, 5
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(layers))).to(device)
        inputs = torch.zeros(1, 4, device=device)
        best = float("inf")
        for _ in range(rounds):
            started = time.perf_counter()
            out = model(inputs).sum()
            out.backward()
            best = min(best, time.perf_counter() - started)
        return best / count_nodes([model(inputs).sum().grad_fn])


class NodeCounters:
    """The newest counters of this node and of this rank's GPU, read by a thread every two seconds."""

    def __init__(self, device: torch.device) -> None:
        self.latest: dict[str, float] = {}
        self._stop = threading.Event()
        self._gpu = open_gpu_counters(device)
        self._thread = threading.Thread(target=self._sample, name="node counters", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _sample(self) -> None:
        while True:
            self.latest = {**read_node_counters(), **self._gpu()}
            if self._stop.wait(_SAMPLE_SECONDS):
                return


def read_node_counters() -> dict[str, float]:
    """Read bytes moved by NICs, and the seconds in which processes were stalled by disks or memory, since boot."""
    counters = {}
    net_bytes = [*_read_infiniband_bytes(), *_read_ethernet_bytes()]
    if net_bytes:
        counters["net_bytes"] = float(sum(net_bytes))
    for kind, name in (("io", "io_stall"), ("memory", "memory_stall")):
        with suppress(OSError, ValueError, IndexError):
            pressure = Path(f"/proc/pressure/{kind}").read_text().splitlines()[0]
            counters[name] = int(pressure.rpartition("total=")[2]) / 1e6
    return counters


def _read_infiniband_bytes() -> Iterator[int]:
    for port in Path("/sys/class/infiniband").glob("*/ports/*/counters"):
        for name in ("port_xmit_data", "port_rcv_data"):
            with suppress(OSError, ValueError):
                yield int((port / name).read_text()) * 4  # the counters are in units of four bytes


def _read_ethernet_bytes() -> Iterator[int]:
    for device in Path("/sys/class/net").glob("*"):
        if device.name == "lo":
            continue
        for name in ("tx_bytes", "rx_bytes"):
            with suppress(OSError, ValueError):
                yield int((device / "statistics" / name).read_text())


def open_gpu_counters(device: torch.device) -> Callable[[], dict[str, float]]:
    """Return what reads use (percent), clock (MHz) and power (W) of a GPU; nothing without a GPU or its library."""
    if device.type != "cuda":
        return dict
    nvml = load_nvml()
    if nvml is None:
        return dict
    try:
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except nvml.NVMLError:  # no driver that answers, or a device that only CUDA knows
        return dict

    def read() -> dict[str, float]:
        counters: dict[str, float] = {}
        with suppress(nvml.NVMLError):
            counters["gpu_busy"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            counters["gpu_mhz"] = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            counters["gpu_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return counters

    return read
