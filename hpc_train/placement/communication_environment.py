"""Choose the environment variables of the communication libraries, and report inherited ones that do harm.

A value that the user has set is never changed. Variables that control NCCL's internals (algorithm, protocol, channels,
levels of P2P or GPUDirect) are never set, because NCCL tunes them itself. All ranks get the same values, unless nodes
have different names for their devices: NCCL expects the same NICs on every rank of a node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VariableSetting:
    """A variable to set, unless the user has set it."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.reason})"


@dataclass(frozen=True)
class HarmfulVariable:
    """An inherited variable that does harm and is rarely set on purpose."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} is inherited: {self.why}"


_UNTUNED = "takes NCCL's own choice away for every message size; unset it unless you measure that it helps"
_SLOW = "turns a fast path off; meant for debugging"
_STALE = "overrides what NCCL finds out about this machine; a value from another one makes it slow"
_HARMFUL: dict[str, str] = {
    "NCCL_ALGO": _UNTUNED,
    "NCCL_PROTO": f"{_UNTUNED}; a protocol that the platform does not support may corrupt data",
    "NCCL_MIN_NCHANNELS": _STALE,
    "NCCL_MAX_NCHANNELS": _STALE,
    "NCCL_MIN_CTAS": _STALE,
    "NCCL_MAX_CTAS": _STALE,
    "NCCL_NTHREADS": _STALE,
    "NCCL_NET_GDR_LEVEL": _STALE,
    "NCCL_NET_GDR_READ": _STALE,
    "NCCL_P2P_LEVEL": _STALE,
    "NCCL_GRAPH_FILE": _STALE,
    "NCCL_P2P_DISABLE": _SLOW,
    "NCCL_IB_DISABLE": _SLOW,
    "NCCL_SHM_DISABLE": _SLOW,
    "NCCL_NVLS_DISABLE": _SLOW,
    "NCCL_CUMEM_ENABLE": _STALE,
    "NCCL_TOPO_DUMP_FILE": "all ranks write the same file at once; set it on one",
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel; meant for debugging",
}
_OFF = {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_DISABLE", "CUDA_LAUNCH_BLOCKING"}
"""Switches whose default is 0, so that setting 0 does no harm."""


def find_harmful_variables(env: Mapping[str, str], ranks_of_node: int = 1) -> list[HarmfulVariable]:
    """List the variables of `env` that are known to do harm, by name. They are reported, never removed."""
    warnings = [
        HarmfulVariable(name, env[name], why)
        for name, why in _HARMFUL.items()
        if env.get(name) and not (name in _OFF and env[name] == "0")
    ]
    if loose := _find_loose_prefix(env.get("NCCL_IB_HCA", "")):
        why = f"{loose} also matches {loose}0 to {loose}9; write =NAME,NAME for these and no others"
        warnings.append(HarmfulVariable("NCCL_IB_HCA", env["NCCL_IB_HCA"], why))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if ranks_of_node > 1 and visible and "," not in visible and visible != "-1":
        why = (
            "hides the GPUs of its peers from a rank, which some direct paths need; let a rank see all GPUs of its node"
        )
        warnings.append(HarmfulVariable("CUDA_VISIBLE_DEVICES", visible, why))
    return sorted(warnings, key=lambda variable: variable.name)


def _find_loose_prefix(devices: str) -> str | None:
    """Return the first name of NCCL_IB_HCA that also matches a longer one: a prefix that ends with a number."""
    if devices.startswith(("=", "^")):
        return None
    names = [name.partition(":")[0] for name in devices.split(",")]
    return next((name for name in names if re.search(r"_\d+$", name)), None)


def choose_socket_settings(interface: str, nodes: int, named: bool) -> list[VariableSetting]:
    """Choose the network for sockets. named: the configuration names the interface, so set it for one node too."""
    reason = "cluster.fabric.interface" if named else "the network that this host's name resolves to"
    settings = [
        VariableSetting("GLOO_SOCKET_IFNAME", interface, reason if nodes > 1 or named else "one node: no network")
    ]
    if nodes > 1 or named:
        settings.append(
            VariableSetting("NCCL_SOCKET_IFNAME", f"={interface}", f"{reason}; = for this name and no longer one")
        )
    return settings


def choose_nic_settings(used: Sequence[Sequence[str]], dropped: Sequence[Mapping[str, str]]) -> list[VariableSetting]:
    """Choose NCCL_IB_HCA; only if NICs must be excluded, and all nodes name the same ones.

    used: devices fit for GPU traffic, for each node. dropped: device -> why not, for each node.
    """
    lists = {tuple(sorted(devices)) for devices in used}
    whys = {device: why for node in dropped for device, why in node.items()}
    if len(lists) != 1 or not whys or not (devices := next(iter(lists))):
        return []
    without = ", ".join(f"{device}: {why}" for device, why in sorted(whys.items()))
    return [VariableSetting("NCCL_IB_HCA", f"={','.join(devices)}", f"without {without}")]


def choose_cpu_settings(gpu_is_far: bool) -> list[VariableSetting]:
    """Set NCCL_IGNORE_CPU_AFFINITY if the launcher binds ranks to processors that are not next to their GPUs."""
    if not gpu_is_far:
        return []
    why = "the launcher holds ranks to processors away from their GPUs; NCCL's own threads need not be"
    return [VariableSetting("NCCL_IGNORE_CPU_AFFINITY", "1", why)]


def combine_with_site(
    settings: Sequence[VariableSetting], site: Mapping[str, str | None]
) -> tuple[list[VariableSetting], list[str]]:
    """Put the site's own values (cluster.environment) in place of ours.

    Returns (settings, names of those that would have been set, had the site not refused them).
    """
    chosen = [setting for setting in settings if setting.name not in site]
    chosen += [VariableSetting(name, value, "cluster.environment") for name, value in site.items() if value is not None]
    return chosen, [setting.name for setting in settings if setting.name in site and site[setting.name] is None]


def find_missing_file(site: Mapping[str, str | None], host: str) -> str | None:
    """Return one line if the topology file that the site names for NCCL is not a file on this host: NCCL only warns."""
    name = site.get("NCCL_TOPO_FILE")
    if name is None or Path(name).is_file():
        return None
    return f"cluster.environment: NCCL_TOPO_FILE={name} is not a file on {host}; expected NCCL's topology XML there"


def apply_settings(
    settings: Sequence[VariableSetting], env: MutableMapping[str, str]
) -> tuple[list[VariableSetting], list[str]]:
    """Set the variables that are not set yet. Returns (those set, names of those the user had set otherwise)."""
    done, unchanged = [], []
    for setting in settings:
        if setting.name not in env:
            env[setting.name] = setting.value
            done.append(setting)
        elif env[setting.name] != setting.value:
            unchanged.append(setting.name)
    return done, unchanged
