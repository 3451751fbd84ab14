"""Turn what a user gives as `extra` into JSON values and tensors, and back.

JSON holds less than the state of a scheduler or a random generator: no tensors, no tuples, no infinity, no numbers as
keys. Each of these becomes a dictionary of one marked key; everything else stays as it is, so that
`hpc-train checkpoint inspect` shows what a person wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_layout import dtype_name, parse_dtype
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard

_MARKS = ("$tensor", "$array", "$tuple", "$items", "$number")
_MAX_NUMBERS = 1 << 40


def pack_extra(value: Any, rank: int) -> tuple[Any, list[TensorShard]]:
    """Return `value` as JSON, and its tensors as the shards `extra.0`, `extra.1`, ..., which rank 0 writes.

    The result shares no container with `value`, which may change afterwards. Raises UserError, with the place in
    `extra`, for what is neither JSON, a tensor, an array nor a tuple.
    """
    shards: list[TensorShard] = []
    return _pack(value, "extra", rank, shards), shards


def unpack_extra(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what `pack_extra` was given. tensors: those of `make_extra_targets`, filled."""
    if isinstance(value, list):
        return [unpack_extra(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or (mark := next(iter(value))) not in _MARKS:
        return {key: unpack_extra(item, tensors) for key, item in value.items()}
    content = value[mark]
    if mark == "$tensor":
        return tensors[content["index"]]
    if mark == "$array":
        return tensors[content["index"]].numpy()
    if mark == "$number":
        return float(content)
    if mark == "$tuple":
        return tuple(unpack_extra(item, tensors) for item in content)
    return {unpack_extra(key, tensors): unpack_extra(item, tensors) for key, item in content}


def make_extra_targets(value: Any) -> list[TensorShard]:
    """Make empty tensors in CPU memory for those that `value`, a packed extra, names; in the order of their index."""
    targets: dict[int, TensorShard] = {}
    _collect_targets(value, targets)
    if sorted(targets) != list(range(len(targets))):
        raise CheckpointError("its extra names tensors that it does not number from 0")
    return [targets[index] for index in range(len(targets))]


def _pack(value: Any, where: str, rank: int, shards: list[TensorShard]) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$number": str(float(value))}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return _pack(value.item(), where, rank, shards)
    if isinstance(value, Tensor | np.ndarray):
        return _pack_tensor(value, where, rank, shards)
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item, f"{where}[{index}]", rank, shards) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(item, f"{where}[{index}]", rank, shards) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, rank, shards)
    raise UserError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; give numbers, text, lists, "
        "dictionaries, tensors or arrays (of an object with state_dict(), that)"
    )


def _pack_mapping(value: Mapping[Any, Any], where: str, rank: int, shards: list[TensorShard]) -> Any:
    plain = all(isinstance(key, str) for key in value) and not (len(value) == 1 and next(iter(value)) in _MARKS)
    if plain:
        return {key: _pack(item, f"{where}[{key!r}]", rank, shards) for key, item in value.items()}
    items = [
        [_pack(key, f"a key of {where}", rank, shards), _pack(item, f"{where}[{key!r}]", rank, shards)]
        for key, item in value.items()
    ]
    return {"$items": items}


def _pack_tensor(
    value: Tensor | np.ndarray[Any, Any], where: str, rank: int, shards: list[TensorShard]
) -> dict[str, Any]:
    mark = "$tensor" if isinstance(value, Tensor) else "$array"
    if isinstance(value, DTensor):
        raise UserError(f"{where} is a DTensor; give its full_tensor(), or put the module that has it into model=")
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        name = dtype_name(tensor.dtype)
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{where}: {value.dtype} values cannot be saved in a checkpoint") from error
    index, shape = len(shards), tuple(tensor.shape)
    shards.append(TensorShard(f"extra.{index}", shape, tensor.dtype, (0,) * tensor.ndim, tensor, replica=rank))
    return {mark: {"index": index, "dtype": name, "shape": list(shape)}}


def _collect_targets(value: Any, targets: dict[int, TensorShard]) -> None:
    if isinstance(value, list):
        for item in value:
            _collect_targets(item, targets)
    if not isinstance(value, dict):
        return
    mark = next(iter(value), None) if len(value) == 1 else None
    if mark not in ("$tensor", "$array"):
        for item in value.values():
            _collect_targets(item, targets)
        return
    target = _make_target(value[mark])
    targets[int(target.name.removeprefix("extra."))] = target


def _make_target(content: Any) -> TensorShard:
    """Make one target. The manifest is from outside: whatever does not fit is damage."""
    try:
        index, shape = int(content["index"]), tuple(int(size) for size in content["shape"])
        dtype = parse_dtype(content["dtype"])
        if index < 0 or min(shape, default=0) < 0 or math.prod(shape) > _MAX_NUMBERS:
            raise ValueError(content)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("its extra names a tensor without a valid index, dtype and shape") from error
    return TensorShard(f"extra.{index}", shape, dtype, (0,) * len(shape), torch.empty(shape, dtype=dtype))
