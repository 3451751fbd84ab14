"""Both ends of every cable: what one end says must not contradict what the other one says."""

from __future__ import annotations

from hpc_train.cluster.infiniband.text import SWITCH, Cable, Device, kind_of
from hpc_train.errors import UserError


def connect(devices: dict[str, Device], name: str) -> dict[str, Device]:
    """The devices with every cable known at both ends, and those too that are seen at a far end only.

    A dump of a part of a subnet is legal: a far end without a record is a device of which only that cable is known.
    Raises UserError where two lines contradict each other, and where the file ends within a switch's record.
    """
    everything = dict(devices)
    missing: dict[str, tuple[int, int]] = {}
    for device in devices.values():
        for port, cable in list(device.cables.items()):
            far = everything.get(cable.far) or _seen(cable, everything, name)
            back = far.cables.get(cable.far_port)
            if back is None:
                if cable.far_port > far.ports:
                    raise UserError(
                        f"{name}:{cable.line}: port {cable.far_port} of {far.id}; expected 1 to {far.ports}"
                    )
                far.cables[cable.far_port] = Cable(device.id, port, cable.line, device.name, cable.rate)
                if far.line is not None:
                    missing.setdefault(far.id, (cable.far_port, cable.line))
            elif (back.far, back.far_port) != (device.id, port):
                raise _contradiction(device.id, port, cable, back, name)
    _check_end(devices, missing, name)
    return everything


def _seen(cable: Cable, everything: dict[str, Device], name: str) -> Device:
    kind = kind_of(cable.far)
    if kind is None:
        raise UserError(
            f"{name}:{cable.line}: {cable.far} has no record; expected one, for its id does not tell its kind"
        )
    return everything.setdefault(cable.far, Device(cable.far, kind, None, name=cable.far_name))


def _contradiction(id: str, port: int, cable: Cable, back: Cable, name: str) -> UserError:
    return UserError(
        f"{name}:{cable.line}: {id}[{port}] goes to {cable.far}[{cable.far_port}], by line {back.line} that port goes "
        f"to {back.far}[{back.far_port}]; expected both ends of a cable to agree"
    )


def _check_end(devices: dict[str, Device], missing: dict[str, tuple[int, int]], name: str) -> None:
    """A switch whose record was cut lost hosts that nothing else tells of: its level would be wrong."""
    last = max(devices.values(), key=lambda it: it.line or 0)
    if last.kind == SWITCH and set(missing) == {last.id}:
        port, line = missing[last.id]
        raise UserError(
            f"{name}:{last.line}: the file ends within {last.id}: line {line} tells of its port {port}, its record "
            "does not; expected a whole record"
        )
