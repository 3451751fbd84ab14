"""List the tensors of a module as shards, however it is split: plain, DDP, FSDP2, tensor parallel, or several of these.

A DTensor says which rectangle of the whole a rank holds. The ranks compare their rectangles to agree which of several
holders writes one, so the caller need not say how the ranks are arranged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World
from hpc_train.runtime.consensus import report_lost_ranks
from hpc_train.shard_rectangles import FusedParts, find_fused_parts, list_rectangles

Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""A model; the pipeline stages of one; or several models by name, such as a model and its moving average."""

T = TypeVar("T", bound=Tensor)
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile and torch's checkpoint_wrapper add to the modules that they wrap."""
_PARALLEL = (DistributedDataParallel, nn.DataParallel)
"""Wrappers whose name for what they wrap, `module`, a user's own module may have, too."""


def name_tensors(modules: Modules) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Return (parameters, persistent buffers) by name; names are the same with and without wrappers.

    A parameter that two modules share has the name of the first. Raises UserError for what cannot be saved: FSDP1,
    state that is not a tensor, and two tensors of one name.
    """
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in _list_modules(modules):
        _reshard_or_refuse(module)
        wrapped = frozenset(path for path, part in module.named_modules() if isinstance(part, _PARALLEL))
        unseen = [(name, p) for name, p in module.named_parameters() if p not in seen]
        seen.update(p for _, p in unseen)
        persistent = module.state_dict(keep_vars=True)
        _refuse_other_state(persistent)
        for name, parameter in unseen:
            _add_once(parameters, prefix + _strip_wrapper_names(name, wrapped), parameter)
        for name, buffer in module.named_buffers():
            if name in persistent:
                _add_once(buffers, prefix + _strip_wrapper_names(name, wrapped), buffer)
    if both := sorted(parameters.keys() & buffers.keys()):
        raise UserError(f"two tensors of the model have the name {both[0]!r}; give the modules as a dictionary")
    return parameters, buffers


def find_fused_names(modules: Modules, parameters: Mapping[str, nn.Parameter]) -> dict[str, FusedParts]:
    """Return the parts of the fused parameters among `parameters`, by name; see shard_rectangles."""
    fused: dict[nn.Parameter, FusedParts] = {}
    for _, module in _list_modules(modules):
        fused.update(find_fused_parts(module))
    return {name: fused[parameter] for name, parameter in parameters.items() if parameter in fused}


def make_shards(tensors: Mapping[str, Tensor], fused: Mapping[str, FusedParts]) -> list[TensorShard]:
    """Make the shards that this rank holds of tensors, sharing their memory; none of a tensor that it holds no part of.

    tensors: parameters, buffers and optimizer state, by name. fused: parts of parameters.
    """
    shards = []
    for name, tensor in tensors.items():
        parts = fused.get(name.split(".", 2)[2] if name.startswith("optim.") else name)
        if isinstance(tensor, DTensor):
            if any(isinstance(how, Partial) for how in tensor.placements):
                raise UserError(f"tensor {name!r} is a sum that is not reduced yet (Partial); redistribute it first")
            if tensor.device_mesh.get_coordinate() is None:
                continue
        rectangles = list_rectangles(tensor, None if parts is None else parts.fit(tuple(tensor.shape)))
        shards += [TensorShard(name, tuple(tensor.shape), tensor.dtype, offset, local) for offset, local in rectangles]
    return shards


def choose_writers(shards: list[TensorShard], first_writes: frozenset[str], world: World) -> list[TensorShard]:
    """Return the shards with their `replica`: 0 on the one rank that writes it. A collective.

    Ranks that hold the same rectangles write equal parts of them, the largest dealt first. first_writes: names that the
    first holder writes, because copies of them may differ (buffers).
    """
    if world.size == 1:
        return shards
    hashes = np.array([_hash_rectangle(shard) for shard in shards], dtype=np.int64)
    holders = _find_holders(hashes, world)
    # Holders of the same rectangles sort them alike (size, then hash), so they deal them out alike without a message.
    order = sorted(range(len(shards)), key=lambda at: (-shards[at].local.numel(), hashes[at]))
    dealt: dict[bytes, int] = defaultdict(int)
    chosen = list(shards)
    for at in order:
        ranks = np.flatnonzero(holders[:, at])
        turn = 0
        if shards[at].name not in first_writes:
            group = holders[:, at].tobytes()
            turn, dealt[group] = dealt[group], dealt[group] + 1
        own_index = int(np.searchsorted(ranks, world.rank))
        chosen[at] = replace(shards[at], replica=(own_index - turn) % len(ranks))
    return chosen


def _list_modules(modules: Modules) -> list[tuple[str, nn.Module]]:
    """Return the modules with the prefixes of their names. Raises UserError for what is none."""
    if isinstance(modules, Mapping):
        listed = [(f"{name}.", module) for name, module in modules.items()]
    else:
        stages = modules if isinstance(modules, Sequence) else [modules]
        listed = [("", module) for module in stages]
    for _, module in listed:
        if not isinstance(module, nn.Module):
            raise UserError(f"model= contains {type(module).__name__}; give modules, in a list or a dictionary")
    return listed


def _reshard_or_refuse(module: nn.Module) -> None:
    """Let fully_shard show its shards: after a forward without a backward it shows gathered parameters."""
    for part in module.modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UserError(
                "FullyShardedDataParallel (FSDP1) cannot be saved: its flat parameters have no names; "
                "use torch.distributed.fsdp.fully_shard"
            )
        if isinstance(part, FSDPModule):
            part.reshard()


def _refuse_other_state(state: Mapping[str, object]) -> None:
    other = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise UserError(f"{other!r} of the model is not a tensor (get_extra_state); save it through extra= instead")


def _strip_wrapper_names(name: str, wrapped: frozenset[str]) -> str:
    """Return the name that a tensor has without wrappers. wrapped: the paths of DistributedDataParallel modules."""
    parts = name.split(".")
    return ".".join(
        part
        for at, part in enumerate(parts)
        if part not in _WRAPPERS and not (part == "module" and ".".join(parts[:at]) in wrapped)
    )


def _add_once(tensors: dict[str, T], name: str, tensor: T) -> None:
    if name in tensors:
        raise UserError(f"two tensors of the model have the name {name!r}; give the modules as a dictionary")
    tensors[name] = tensor


def _hash_rectangle(shard: TensorShard) -> int:
    text = repr((shard.name, shard.offset, tuple(shard.local.shape)))
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True)


def _find_holders(hashes: NDArray[np.int64], world: World) -> NDArray[np.bool_]:
    """Return which ranks hold which of this rank's rectangles, (ranks, own rectangles). A collective."""
    with report_lost_ranks():
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
        dist.all_gather(counts, torch.tensor([len(hashes)]))
        most = max(int(count) for count in counts)
        padded = torch.zeros(most, dtype=torch.int64)
        padded[: len(hashes)] = torch.from_numpy(hashes)
        tables = [torch.empty_like(padded) for _ in range(world.size)]
        dist.all_gather(tables, padded)
    used = [np.isin(hashes, table[: int(count)].numpy()) for table, count in zip(tables, counts, strict=True)]
    return np.stack(used)
