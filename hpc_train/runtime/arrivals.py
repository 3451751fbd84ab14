"""Track which processes of a job have reached its store, and where the missing ones should be."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpc_train.cluster.slurm.hostlist import compress, expand
from hpc_train.errors import UserError
from hpc_train.runtime.identity import Identity

if TYPE_CHECKING:
    from torch.distributed import Store

_SHOWN = 8


def arrival_key(process: int) -> str:
    """Return the store key that a process sets when it arrives."""
    return f"met/{process}"


def name_missing(store: Store, me: Identity, env: Mapping[str, str] = os.environ) -> str:
    """Name the missing tasks and, if Slurm tells, their nodes, such as `tasks 3, 7 on node2`."""
    missing = [process for process in range(1, me.processes) if not store.check([arrival_key(process)])]
    hosts = compress(sorted({host for process in missing if (host := _host(process, me, env))}))
    named = ", ".join(map(str, missing[:_SHOWN])) + (f" and {len(missing) - _SHOWN} more" if missing[_SHOWN:] else "")
    return f"task{'s' if len(missing) > 1 else ''} {named}" + (f" on {hosts}" if hosts else "")


def _host(process: int, me: Identity, env: Mapping[str, str]) -> str:
    """Return a task's node, as Slurm numbers tasks node by node by default; "" if that is unknown."""
    names = _nodes(env)
    if me.processes % max(len(names), 1) or "cyclic" in env.get("SLURM_DISTRIBUTION", ""):
        return ""
    return names[process * len(names) // me.processes] if names else ""


def _nodes(env: Mapping[str, str]) -> Sequence[str]:
    try:
        return list(expand(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""))
    except UserError:
        return []
