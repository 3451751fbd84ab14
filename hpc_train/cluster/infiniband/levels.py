"""How far each switch is from the hosts: leaves are level 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping

from hpc_train.cluster.infiniband.text import SWITCH, Device
from hpc_train.errors import UserError


def switch_levels(devices: Mapping[str, Device], hosts: Container[str], name: str) -> dict[str, int]:
    """Switch -> hops to the nearest one that holds a host. hosts: adapters that are in hosts.

    A switch without a record may hold hosts that the dump does not tell of, and so may the last one of a dump that
    tells but a part of its devices: it may be cut there. A level that hangs on what such a switch may hold is refused;
    a switch without a record on which no host is seen is left out. Switches that no host is connected to are level 0.
    """
    switches = {id: it for id, it in devices.items() if it.kind == SWITCH}
    leaves = [id for id, it in switches.items() if any(cable.far in hosts for cable in it.cables.values())]
    farthest = _distances(switches, leaves)
    nearest = _distances(switches, [*leaves, *_uncertain(devices)])
    for id, level in nearest.items():
        if (line := switches[id].line) is not None and farthest.get(id) != level:
            raise UserError(
                f"{name}:{line}: how far {id} is from a host hangs on switches that have no whole record; "
                "expected the whole dump"
            )
    known = {id: farthest.get(id, 0) for id, it in switches.items() if it.line is not None}
    return known | dict.fromkeys(leaves, 0)


def _uncertain(devices: Mapping[str, Device]) -> list[str]:
    """Switches that may have more cables than the dump tells."""
    seen = [id for id, it in devices.items() if it.line is None]
    last = max(devices.values(), key=lambda it: it.line or 0)
    return [it for it in [*seen, *([last.id] if seen else [])] if devices[it].kind == SWITCH]


def _distances(switches: Mapping[str, Device], start: Iterable[str]) -> dict[str, int]:
    found = dict.fromkeys(start, 0)
    queue = deque(found)
    while queue:
        id = queue.popleft()
        for cable in switches[id].cables.values():
            if cable.far in switches and cable.far not in found:
                found[cable.far] = found[id] + 1
                queue.append(cable.far)
    return found
