"""The extended attribute `lustre.lov`: a layout as the client in the kernel takes and gives it, without `lfs`.

struct lov_user_md_v1, little-endian: magic, pattern (u32 each), object id (16 bytes), stripe size (u32), stripe count,
stripe offset (u16 each); v3 adds the name of the pool (16 bytes). Each object follows in 24 bytes: its id (16),
generation and OST index (u32 each).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from hpc_train.checkpoint.storage.getstripe import Placed, Striped
from hpc_train.checkpoint.storage.striping import ALL, Component, Layout

ATTRIBUTE = "lustre.lov"
_V1, _V3, _COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD60BD0
_HEADER = struct.Struct("<II16sIHH")
_POOL = struct.Struct("<16s")
_OBJECT = struct.Struct("<16sII")
_RAID0 = 1
_ANY = 0xFFFF
_LONGEST_POOL = 15


def set_attribute(path: Path, layout: Layout, name: str = ATTRIBUTE) -> None:
    """Set what new files of a directory get. Raises OSError, and ValueError for a layout that needs `lfs`.

    For directories only: on a file that has a layout the kernel ignores it and says nothing.
    """
    os.setxattr(path, name, pack(layout))


def get_attribute(path: Path, name: str = ATTRIBUTE) -> Striped:
    """The layout of a file or a directory. Raises OSError, and ValueError for one that needs `lfs`."""
    return unpack(os.getxattr(path, name))


def pack(layout: Layout) -> bytes:
    """A plain layout; of several components ValueError."""
    it = layout[0]
    if len(layout) > 1 or it.on_mdt or it.end is not None:
        raise ValueError("a layout of several components is set by lfs only")
    count = _ANY if it.count == ALL else it.count
    head = _HEADER.pack(_V3 if it.pool else _V1, _RAID0, bytes(16), it.size or 0, count, _ANY)
    if not it.pool:
        return head
    pool = it.pool.rpartition(".")[2].encode()
    if len(pool) > _LONGEST_POOL:
        raise ValueError(f"pool {it.pool!r}: the name is longer than {_LONGEST_POOL} bytes")
    return head + _POOL.pack(pool)


def unpack(data: bytes) -> Striped:
    """Raises ValueError for what is no plain layout."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are no layout")
    magic, pattern, _, size, count, first = _HEADER.unpack_from(data)
    if magic == _COMPOSITE:
        raise ValueError("a layout of several components is read by lfs only")
    if magic not in (_V1, _V3) or pattern != _RAID0:
        raise ValueError(f"magic 0x{magic:08X}, pattern {pattern}: no layout that is known here")
    at = _HEADER.size
    pool = None
    if magic == _V3:
        if len(data) < at + _POOL.size:
            raise ValueError("a layout that ends in the name of its pool")
        pool = _POOL.unpack_from(data, at)[0].partition(b"\0")[0].decode(errors="replace") or None
        at += _POOL.size
    osts = tuple(index for _, _, index in _OBJECT.iter_unpack(data[at : at + (len(data) - at) // 24 * 24]))
    component = Component(count=ALL if count == _ANY else count, size=size or None, pool=pool)
    return Striped((Placed(component, osts, None if first == _ANY else first),))
