"""Check whether the counted memory keeps to the plan, and whether it fits on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.config.run import RunConfig
from hpc_train.planner.constants import of_cluster
from hpc_train.planner.rehearsal.result import Built, Fit

TOLERANCE = 0.05
"""Share of the plan by which a counted peak may exceed it."""
SEGMENT = 16 * 2**20
"""Bytes a peak may always exceed the plan by: CUDA's allocator takes memory in segments of 20 MiB."""
_GIB, _MIB = 2**30, 2**20
_COUNTED_AS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("forward", "backward", "other"),
    "gathered parameters": ("gathered",),
}
"""Part, as named in messages -> ledger.KINDS it is counted under."""
_PLANNED_AS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits"),
    "gathered parameters": ("buffers",),
}
"""Part, as named in messages -> parts of the plan."""


@dataclass(frozen=True)
class Device:
    """Memory of a rank's device."""

    bytes: float
    fragmentation: float
    """Memory that the allocator holds in addition, as a share of what is allocated."""
    context: float
    """Bytes taken by the driver, libraries and communicators."""

    def taken(self, peak: float) -> float:
        """Return the device bytes that a peak of counted memory takes."""
        return peak * (1 + self.fragmentation) + self.context


def device_of(config: RunConfig) -> Device | None:
    """Return the device; None if cluster.gpu.memory_gib is not given."""
    if not config.cluster.gpu.memory_gib:
        return None
    constants = of_cluster(config.cluster)
    return Device(config.cluster.gpu.memory_gib * _GIB, constants.fragmentation, constants.context)


def judge(
    ranks: Sequence[Built],
    planned: Mapping[int, Mapping[str, float]],
    device: Device | None,
    real_less_stand_in: Mapping[int, float] | None = None,
) -> Fit:
    """Compare the counted peaks with the plan and with the device.

    planned: bytes by part, by rank, of what was rehearsed. real_less_stand_in: by rank, bytes that the real run needs
    more than its rehearsed stand-in, according to the plan.
    """
    stepped = [built for built in ranks if built.counted.peak is not None]
    if not stepped:
        return Fit(True, None, ("fits: not known, as no step was trained",))
    changed = real_less_stand_in or {}
    wrong = [line for built in stepped for line in _compare(built, planned.get(built.rank, {}))]
    within_plan = not wrong
    needs = {built.rank: (built.counted.peak or 0) + changed.get(built.rank, 0.0) for built in stepped}
    over = [built for built in stepped if device is not None and device.taken(needs[built.rank]) > device.bytes]
    for built in over:
        assert device is not None
        wrong.append(_exceeds(built, needs[built.rank], device))
    fullest = max(stepped, key=lambda built: needs[built.rank])
    if wrong:
        return Fit(within_plan, None if device is None else not over, tuple(wrong))
    return Fit(True, None if device is None else True, (_good(fullest, needs[fullest.rank], planned, device),))


def _compare(built: Built, plan: Mapping[str, float]) -> list[str]:
    """Return one line if the rank's peak exceeds its plan."""
    total, peak = sum(plan.values()), built.counted.peak or 0
    if not plan or peak <= max(total * (1 + TOLERANCE), total + SEGMENT):
        return []
    counted = {part: _sum(built.counted.at_peak, kinds) for part, kinds in _COUNTED_AS.items()}
    expected = {part: _sum(plan, names) for part, names in _PLANNED_AS.items()}
    part = max(counted, key=lambda name: counted[name] - expected[name])
    return [
        f"{_where(built)} needs {_size(peak, peak)}, {peak / total - 1:.0%} more than the {_size(total, peak)} of the "
        f"plan (allowed: {TOLERANCE:.0%}); most of it {part}: {_size(counted[part], peak)} counted, "
        f"{_size(expected[part], peak)} planned"
    ]


def _exceeds(built: Built, needed: float, device: Device) -> str:
    taken = device.taken(needed)
    largest = max(_COUNTED_AS, key=lambda part: _sum(built.counted.at_peak, _COUNTED_AS[part]))
    return (
        f"{_where(built)} does not fit: {_size(needed, needed)}, with allocator and driver "
        f"{_size(taken, device.bytes)}, are {_size(taken - device.bytes, device.bytes)} more than the "
        f"{_size(device.bytes, device.bytes)} of the device; most of it {largest}: "
        f"{_size(_sum(built.counted.at_peak, _COUNTED_AS[largest]), needed)}"
    )


def _good(fullest: Built, needed: float, planned: Mapping[int, Mapping[str, float]], device: Device | None) -> str:
    plan = sum(planned.get(fullest.rank, {}).values())
    against = f", the plan says {_size(plan, needed)}" if plan else ""
    if device is None:
        rest = "; cluster.gpu.memory_gib is not known, so whether it fits is not"
        return f"keeps to the plan: {_where(fullest)} needs most, {_size(needed, needed)}{against}{rest}"
    taken = _size(device.taken(needed), device.bytes)
    return (
        f"fits: {_where(fullest)} needs most, {_size(needed, needed)}{against}; with allocator and driver {taken} "
        f"of {_size(device.bytes, device.bytes)}"
    )


def _where(built: Built) -> str:
    return f"rank {built.rank} (pipeline rank {built.at['pp']})" if built.at.get("pp") else f"rank {built.rank}"


def _sum(parts: Mapping[str, float], names: Sequence[str]) -> float:
    return float(sum(parts.get(name, 0) for name in names))


def _size(size: float, like: float) -> str:
    """Format a size in GiB, or in MiB if `like`, shown beside it, is less than one GiB."""
    return f"{size / _GIB:,.1f} GiB" if like >= _GIB else f"{size / _MIB:,.1f} MiB"
