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

MAX_BYTES = 1 << 30
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
    return add_up(read_spans(trace.path))


@dataclass(frozen=True)
class TraceSpan:
    """An event of a trace that lasts: a range or an operator of a host thread, or a kernel. Times are microseconds."""

    name: str
    category: object
    begin: float
    duration: float
    thread: tuple[object, object]
    """Process and thread, as the trace numbers them."""
    operator_id: object
    """Of an operator, and of the kernels that it started; None: the trace has none."""
    sequence_number: object
    """Of an operator that made a node of the autograd graph, and of that node's backward; None: the trace has none."""

    @property
    def end(self) -> float:
        """When it ends, in microseconds."""
        return self.begin + self.duration

    @classmethod
    def from_event(cls, event: object) -> TraceSpan | None:
        """Return the span of an entry of `traceEvents`; None if that has no name, begin and duration."""
        if not isinstance(event, dict) or event.get("ph") != "X":
            return None
        name, begin, duration, arguments = event.get("name"), event.get("ts"), event.get("dur"), event.get("args", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        if not isinstance(begin, (int, float)) or not isinstance(duration, (int, float)):
            return None
        thread = event.get("pid"), event.get("tid")
        identifiers = arguments.get("External id"), arguments.get("Sequence number")
        return cls(name, event.get("cat"), begin, duration, thread, *identifiers)


def read_spans(path: Path) -> list[TraceSpan]:
    """Read the events of a trace that have a duration. Raises UserError if it cannot be read."""
    try:
        entries = json.loads(_uncompress(path))["traceEvents"]
        spans = [span for span in map(TraceSpan.from_event, entries) if span is not None]
    except (OSError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a trace that can be read ({type(error).__name__}: {error})") from error
    if not any(span.name.startswith(STEP_PREFIX) for span in spans):
        raise UserError(f"{path}: holds no step; the run may have ended in its first traced step")
    return spans


def _uncompress(path: Path) -> bytes:
    with open_to_read(path) as file:
        # 16: with gzip's header. Piece by piece, so that a small file that unpacks to a huge one is refused in time.
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        parts, size = [], 0
        while data := file.read(1 << 20):
            parts.append(unpacker.decompress(data, MAX_BYTES - size + 1))
            size += len(parts[-1])
            if size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB; open it in Perfetto, or trace fewer steps")
    if not unpacker.eof:
        raise ValueError("its end is missing")
    return b"".join(parts)


@dataclass
class _HostSpan:
    """A range or an operator of a host thread, and where it lies."""

    span: TraceSpan
    self_us: float
    """Microseconds without those of the spans inside."""
    module: str | None
    """The innermost module around it."""
    backward: bool


def add_up(spans: Sequence[TraceSpan]) -> Profile:
    """Add up the spans of a trace."""
    durations = [
        span.duration for span in spans if span.name.startswith(STEP_PREFIX) and span.category == "user_annotation"
    ]
    steps = max(1, len(durations))
    scale = 1e-6 / steps
    hosts = list(_nest_threads(spans))
    _find_modules_of_backward(hosts)
    device = _add_device_times(spans)
    phases: dict[str, float] = defaultdict(float)
    operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    modules: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for host in hosts:
        name, of_kernels = host.span.name, device.get(host.span.operator_id, 0.0)
        if name.startswith(PHASE_PREFIX):
            phases[name.removeprefix(PHASE_PREFIX)] += host.span.duration * scale
        elif host.span.category == "cpu_op":
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


def _nest_threads(spans: Sequence[TraceSpan]) -> Iterator[_HostSpan]:
    """Find what lies inside what, thread by thread, in the order of their begin."""
    threads: dict[tuple[object, object], list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.category in _HOST:
            threads[span.thread].append(span)
    for of_thread in threads.values():
        # Outer spans before inner ones that begin at the same moment.
        of_thread.sort(key=lambda span: (span.begin, -span.duration))
        open_spans: list[_HostSpan] = []
        for span in of_thread:
            while open_spans and open_spans[-1].span.end <= span.begin:
                open_spans.pop()
            outer = open_spans[-1] if open_spans else None
            module = outer.module if outer is not None else None
            if span.name.startswith(MODULE_PREFIX):
                module = span.name.removeprefix(MODULE_PREFIX)
            backward = (outer is not None and outer.backward) or span.name.startswith(_BACKWARD)
            nested = _HostSpan(span, span.duration, module, backward)
            # A phase is no part of what it lies in: it may end in another range than it began in.
            if outer is not None and not span.name.startswith(PHASE_PREFIX):
                outer.self_us = max(0.0, outer.self_us - span.duration)
            yield nested
            open_spans.append(nested)


def _find_modules_of_backward(hosts: Sequence[_HostSpan]) -> None:
    """Give the operators of a backward the module whose forward has their sequence number."""
    modules = {
        host.span.sequence_number: host.module
        for host in hosts
        if host.module is not None and not host.backward and host.span.sequence_number is not None
    }
    node_end = 0.0
    thread: object = None
    module: str | None = None
    for host in hosts:  # in the order of their begin, thread by thread
        span = host.span
        if span.thread[1] != thread or span.begin >= node_end:
            thread, node_end, module = span.thread[1], 0.0, None
        if span.name.startswith(_BACKWARD):
            node_end, module = span.end, modules.get(span.sequence_number)
        if host.backward and host.module is None:
            host.module = module


def _add_device_times(spans: Sequence[TraceSpan]) -> dict[object, float]:
    """Return the microseconds of the kernels that each operator has started, by its id in the trace."""
    us_by_id: dict[object, float] = defaultdict(float)
    for span in spans:
        if span.category in _DEVICE:
            us_by_id[span.operator_id] += span.duration
    return dict(us_by_id)
