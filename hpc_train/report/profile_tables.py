"""Read a trace of torch.profiler, and add up what its steps went into: phases, operators, modules of the model.

Times are seconds per step of one rank. The own time of an operator is its duration without the operators that it calls;
on a GPU it is the duration of the kernels that it has launched. A backward operator belongs to the module whose forward
made its node of the autograd graph: both have the same sequence number in the trace.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read
from hpc_train.training.records.profile_files import MODULE_PREFIX, PHASE_PREFIX, STEP_PREFIX, TraceFile

MOST_BYTES = 1 << 30
"""Maximum size of an uncompressed trace."""
_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKWARD = "autograd::engine::evaluate_function"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class OperatorTime:
    """Calls and time of one operator, a step."""

    name: str
    calls: float
    """Calls in a step."""
    host: float
    """Own seconds per step on the CPU."""
    device: float
    """Seconds a step of the kernels that it started."""


@dataclass(frozen=True)
class ModuleTime:
    """Seconds a step of the operators right inside modules of one name, with a number in it replaced by `*`.

    Inner modules have rows of their own.
    """

    name: str
    forward: float
    backward: float


@dataclass(frozen=True)
class Profile:
    """Where the time of the traced steps went."""

    steps: int
    seconds: float
    """Length of a step, with what tracing costs."""
    phases: dict[str, float]
    operators: tuple[OperatorTime, ...]
    """Sorted, the longest first."""
    modules: tuple[ModuleTime, ...]
    on_device: bool
    """The times of modules are those of kernels on a GPU."""

    def as_json(self) -> dict[str, Any]:
        """Return all fields as values of JSON."""
        return asdict(self)


def read_profile(trace: TraceFile) -> Profile:
    """Read a trace, and add up its times. Raises UserError if it cannot be read."""
    return add_up(read_events(trace.path))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace that have a duration. Raises UserError if it cannot be read."""
    try:
        spans = [event for event in json.loads(_uncompress(path))["traceEvents"] if _is_span(event)]
    except (OSError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a trace that can be read ({type(error).__name__}: {error})") from error
    if not any(event["name"].startswith(STEP_PREFIX) for event in spans):
        raise UserError(f"{path}: holds no step; the run may have ended in its first traced step")
    return spans


def _is_span(event: Any) -> bool:
    """Whether an entry of a trace has a name, a begin and a duration."""
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("name"), str)
        and all(isinstance(event.get(name), (int, float)) for name in ("ts", "dur"))
        and isinstance(event.get("args", {}), dict)
    )


def _uncompress(path: Path) -> bytes:
    with open_to_read(path) as file:
        # 16: with gzip's header. Piece by piece, so that a small file that unpacks to a huge one is refused in time.
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        parts, size = [], 0
        while data := file.read(1 << 20):
            parts.append(unpacker.decompress(data, MOST_BYTES - size + 1))
            size += len(parts[-1])
            if size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB; open it in Perfetto, or trace fewer steps")
    if not unpacker.eof:
        raise ValueError("its end is missing")
    return b"".join(parts)


@dataclass
class _HostEvent:
    """A range or an operator of a host thread, and where it lies."""

    event: dict[str, Any]
    self_us: float
    """Microseconds without those of the events inside."""
    module: str | None
    """The innermost module around it."""
    backward: bool


def add_up(events: Sequence[dict[str, Any]]) -> Profile:
    """Add up the events of a trace."""
    durations = [
        event["dur"]
        for event in events
        if event["name"].startswith(STEP_PREFIX) and event.get("cat") == "user_annotation"
    ]
    steps = max(1, len(durations))
    scale = 1e-6 / steps
    hosts = list(_nest_threads(events))
    _find_modules_of_backward(hosts)
    device = _add_device_times(events)
    phases: dict[str, float] = defaultdict(float)
    operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    modules: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for host in hosts:
        name, of_kernels = host.event["name"], device.get(_get_external_id(host.event), 0.0)
        if name.startswith(PHASE_PREFIX):
            phases[name.removeprefix(PHASE_PREFIX)] += host.event["dur"] * scale
        elif host.event["cat"] == "cpu_op":
            for index, value in enumerate((1, host.self_us * scale, of_kernels * scale)):
                operators[name][index] += value
        if host.module is not None:
            value = of_kernels if device else host.self_us
            # All layers together: their numbers in the name become one *.
            modules[_NUMBER.sub("*", host.module)][host.backward] += value * scale
    rows = [OperatorTime(name, calls / steps, *times) for name, (calls, *times) in operators.items()]
    rows.sort(key=lambda row: (row.device, row.host), reverse=True)
    of_modules = [ModuleTime(name, *values) for name, values in modules.items()]
    of_modules.sort(key=lambda row: row.forward + row.backward, reverse=True)
    return Profile(steps, sum(durations) * scale, dict(phases), tuple(rows), tuple(of_modules), bool(device))


def _nest_threads(events: Sequence[dict[str, Any]]) -> Iterator[_HostEvent]:
    """Find what lies inside what, thread by thread."""
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _HOST:
            threads[event.get("pid"), event.get("tid")].append(event)
    for thread_events in threads.values():
        # Outer events before inner ones that begin at the same moment.
        thread_events.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_events: list[_HostEvent] = []
        for event in thread_events:
            while open_events and _get_end(open_events[-1].event) <= event["ts"]:
                open_events.pop()
            outer = open_events[-1] if open_events else None
            name = event["name"]
            module = outer.module if outer is not None else None
            if name.startswith(MODULE_PREFIX):
                module = name.removeprefix(MODULE_PREFIX)
            backward = (outer is not None and outer.backward) or name.startswith(_BACKWARD)
            nested = _HostEvent(event, float(event["dur"]), module, backward)
            # A phase is no part of what it lies in: it may end in another range than it began in.
            if outer is not None and not name.startswith(PHASE_PREFIX):
                outer.self_us = max(0.0, outer.self_us - event["dur"])
            yield nested
            open_events.append(nested)


def _get_end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _find_modules_of_backward(hosts: Sequence[_HostEvent]) -> None:
    """Give the operators of a backward the module whose forward has their sequence number."""
    modules = {
        host.event["args"]["Sequence number"]: host.module
        for host in hosts
        if host.module is not None and not host.backward and "Sequence number" in host.event.get("args", {})
    }
    around: tuple[float, str | None] = (0.0, None)
    thread: Any = None
    for host in hosts:  # in the order of their begin, thread by thread
        event = host.event
        if event.get("tid") != thread or event["ts"] >= around[0]:
            thread, around = event.get("tid"), (0.0, None)
        if event["name"].startswith(_BACKWARD):
            around = _get_end(event), modules.get(event.get("args", {}).get("Sequence number"))
        if host.backward and host.module is None:
            host.module = around[1]


def _add_device_times(events: Sequence[dict[str, Any]]) -> dict[Any, float]:
    """Return the microseconds of the kernels that each operator has started, by its id in the trace."""
    us_by_id: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _DEVICE:
            us_by_id[_get_external_id(event)] += event["dur"]
    return dict(us_by_id)


def _get_external_id(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("External id")
