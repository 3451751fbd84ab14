"""Exchange values of JSON's types through the job's store, before a process group exists.

Works over any torch.distributed.Store but a FileStore. torch is only imported to wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store


def publish_value(store: Store, key: str, value: Any) -> None:
    """Give a key a value, of JSON's types, that any process may read."""
    store.set(key, json.dumps(value))


def read_published(store: Store, key: str) -> Any:
    """Return the value of a key; blocks until it is published."""
    return json.loads(store.get(key))


def append_to(store: Store, key: str, value: Any) -> None:
    """Append a value, of JSON's types, to those that other processes have put under this key."""
    appending: Any = store  # torch declares `append` for none of its stores, and has it for all but files
    appending.append(key, json.dumps(value) + "\n")


def gather_from(store: Store, keys: Sequence[str]) -> list[list[Any]]:
    """Return, for each key, the values that processes have appended; blocks until every key has one."""
    return [[json.loads(line) for line in text.decode().splitlines()] for text in store.multi_get(list(keys))]


def arrive_at_gate(store: Store, gate: str, expected: int) -> bool:
    """Count this process at a gate, which opens with the last of the `expected`; returns whether this is the last."""
    last = store.add(gate, 1) == expected
    if last:
        store.set(f"{gate}/open", "")
    return last


def count_arrived(store: Store, gate: str) -> int:
    """Return how many processes have come to a gate."""
    return store.add(gate, 0)


def wait_for_gate(store: Store, gate: str, timeout: timedelta | None = None) -> bool:
    """Wait until all have come to a gate; returns whether they did within `timeout` (default: the store's, raising)."""
    if timeout is None:
        store.wait([f"{gate}/open"])
        return True
    import torch.distributed as dist

    try:
        store.wait([f"{gate}/open"], timeout)
    except dist.DistStoreError:
        return False
    return True
