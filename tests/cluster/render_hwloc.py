"""Write hwloc's XML of one node, of version 1 or 2, from a compact spec of its packages and PCI devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU or a NIC."""

    kind: str
    """gpu or nic."""
    package: int
    bridge: int
    """Which host bridge of the package."""
    switch: int | None
    """Which PCIe switch below that bridge; None: a root port of its own."""


@dataclass(frozen=True)
class Spec:
    packages: int
    devices: tuple[Device, ...]
    version: int = 2
    xgmi: bool = False
    """Whether all GPUs are one xGMI hop apart, which a matrix of distances says."""

    def address(self, device: Device) -> str:
        """Return the PCI address. Domains increase with packages and bridges, so that addresses are in the order of the
        tree.
        """
        place = self.devices.index(device)
        return f"{device.package * 16 + device.bridge:04x}:{0x10 + place:02x}:00.0"


def render(spec: Spec) -> str:
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<!DOCTYPE topology SYSTEM "hwloc{"2" if spec.version == 2 else ""}.dtd">',
    ]
    lines.append('<topology version="2.0">' if spec.version == 2 else "<topology>")
    nodes = (1 << spec.packages) - 1
    lines.append(f'<object type="Machine" os_index="0" cpuset="0x{nodes:08x}" nodeset="0x{nodes:08x}" gp_index="1">')
    lines.append('<info name="HostName" value="node7"/>')
    for package in range(spec.packages):
        sets = f'cpuset="0x0000000f,,0x{1 << package:08x}" nodeset="0x{1 << package:08x}"'
        lines.append(f'<object type="Package" os_index="{package}" {sets}>')
        if spec.version == 2:
            lines.append(f'<object type="NUMANode" os_index="{package}" {sets}/>')
        else:
            lines.append(f'<object type="NUMANode" os_index="{package}" {sets}>')
        lines += _render_bridges(spec, package)
        lines.append("</object>" if spec.version == 2 else "</object></object>")
    lines.append("</object>")
    gpus = [at for at, device in enumerate(spec.devices) if device.kind == "gpu"]
    if spec.xgmi and gpus:
        indexes = " ".join(str(100 + at) for at in gpus)
        values = " ".join(str(int(a != b)) for a in gpus for b in gpus)
        lines.append(f'<distances2 type="OSDev" nbobjs="{len(gpus)}" kind="5" name="XGMIHops" indexing="gp">')
        lines.append(f'<indexes length="9">{indexes}</indexes><u64values length="9">{values}</u64values></distances2>')
    return "\n".join([*lines, "</topology>", ""])


def _render_bridges(spec: Spec, package: int) -> list[str]:
    lines = []
    for bridge in sorted({device.bridge for device in spec.devices if device.package == package}):
        here = [device for device in spec.devices if (device.package, device.bridge) == (package, bridge)]
        domain = f"{package * 16 + bridge:04x}"
        lines.append('<object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[00-ff]">')
        for switch in sorted({device.switch for device in here}, key=str):
            below = [device for device in here if device.switch == switch]
            if switch is not None:
                lines.append(_open_bridge(f"{domain}:00:{switch:02x}.0"))
                lines.append(_open_bridge(f"{domain}:01:{switch:02x}.0"))
            for device in below:
                at = spec.devices.index(device)
                lines.append(_open_bridge(f"{domain}:02:{at:02x}.0"))
                lines += [*_render_device(spec, device), "</object>"]
            if switch is not None:
                lines.append("</object></object>")
        lines.append("</object>")
    return lines


def _open_bridge(address: str) -> str:
    return f'<object type="Bridge" bridge_type="1-1" pci_busid="{address}" pci_type="0604 [1d0f:0200] [0000:0000] 00">'


def _render_device(spec: Spec, device: Device) -> list[str]:
    at, address = spec.devices.index(device), spec.address(device)
    if device.kind == "gpu":
        kind, name, code = "5", f"cuda{at}", "0302 [10de:2330] [10de:16c1] a1"
        info = '<info name="GPUModel" value="NVIDIA H100"/>'
    else:
        kind, name, code = "3", f"mlx5_{at}", "0207 [15b3:1021] [15b3:0087] 00"
        info = '<info name="NodeGUID" value="0002:c903:0000:27AF"/><info name="Port1State" value="4"/>'
    return [
        f'<object type="PCIDev" pci_busid="{address}" pci_type="{code}">',
        f'<object type="OSDev" name="{name}" osdev_type="{kind}" gp_index="{100 + at}">{info}</object>',
        "</object>",
    ]
