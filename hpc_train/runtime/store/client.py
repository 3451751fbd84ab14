"""Client of the job's store: a torch.distributed.Store that process groups of gloo and NCCL accept like any other."""

from __future__ import annotations

import atexit
import errno
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from hpc_train.runtime.store.connection import ConnectionPool, explain_error, format_address
from hpc_train.runtime.store.protocol import Message, Operation, ProtocolError
from hpc_train.units import join_first

if TYPE_CHECKING:
    from hpc_train.runtime.store.server import StoreServer

_DIAGNOSIS_SECONDS = 2.0
"""How long an error message waits to learn which keys were missing."""
_KEYS_NAMED = 4
"""Keys that such a message names."""


class JobStore(dist.Store):
    """Store of the job's keys and values, safe for any number of threads: each call has its own connection.

    Errors are those of torch's stores: DistStoreError if a wait took longer than its timeout, DistNetworkError if the
    server cannot be reached, is gone, or does not know the secret.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, timeout: timedelta, server: StoreServer | None = None
    ) -> None:
        """Connect to the server at `address`. server: this process's own, which is closed with the store."""
        super().__init__()
        self.set_timeout(timeout)
        self.address = address
        self._secret = secret
        self._server = server
        self._pool = ConnectionPool(address, secret)
        # Process groups keep only the C++ half of a store alive, but call the Python half, which must live as long.
        atexit.register(self._close_at_exit)
        self._pool.release(self._pool.acquire(timeout.total_seconds()))

    def close(self) -> None:
        """Close the connections, and this process's server if it has one. Calls that wait end with DistNetworkError.

        The store and its clones cannot be used afterwards.
        """
        atexit.unregister(self._close_at_exit)
        if self._pool.is_forked():
            return
        self._pool.close()
        if self._server is not None:
            self._server.close()

    def _close_at_exit(self) -> None:
        # Threads of process groups call the store. One that calls Python, or is in it, while the interpreter ends
        # would abort the process: so they end first, those that wait here by an error.
        if self._pool.is_forked():
            return
        self._pool.close()
        if dist.is_initialized():
            from hpc_train._torch.process_groups import abort_process_groups

            with suppress(Exception):  # the process ends either way
                abort_process_groups()
        self.close()

    def clone(self) -> dist.Store:
        """Return another store of the same keys, with a timeout of its own."""
        return _Clone(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value, in place of any earlier one."""
        self._call(Operation.SET, [key, value])

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting until it has one."""
        return self._call(Operation.GET, [key]).parts[0]

    def add(self, key: str, amount: int) -> int:
        """Add to the counter of a key, 0 at first, and return its value."""
        return self._call(Operation.ADD, [key], amount).number

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values; does not wait."""
        return bool(self._call(Operation.CHECK, keys).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys have values. Raises DistStoreError after `timeout` (default: the store's)."""
        self._call(Operation.WAIT, keys, timeout=timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it holds what is expected ("": nothing); returns what it holds afterwards."""
        return self._call(Operation.COMPARE_SET, [key, expected, desired]).parts[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it had a value."""
        return bool(self._call(Operation.DELETE, [key]).number)

    def num_keys(self) -> int:
        """Return the number of keys that have values."""
        return self._call(Operation.COUNT, []).number

    deleteKey, getNumKeys = delete_key, num_keys  # as torch's C++ calls them, a PrefixStore for one

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key; a key without a value begins empty."""
        self._call(Operation.APPEND, [key, value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, waiting until all have one."""
        return list(self._call(Operation.GET, keys).parts)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys by one request."""
        self._call(Operation.SET, [part for pair in zip(keys, values, strict=True) for part in pair])

    def set_at_end(self, key: str, value: str) -> None:
        """Have the server set a key when this process ends, however it ends.

        The server notices by the end of a connection: at once, or within two minutes where the whole node is gone.
        """
        seconds = float(self.timeout.total_seconds())  # type: ignore[attr-defined] # torch's stub lacks it
        try:
            self._pool.keep_open(Message(Operation.SET_AT_END, 0, [key.encode(), value.encode()]), seconds)
        except (OSError, ProtocolError) as error:
            raise dist.DistNetworkError(
                f"the job's store at {format_address(self.address)}: {explain_error(error)}"
            ) from None

    def read_clock(self) -> float:
        """Return time.time() of the process that serves the store."""
        return self._call(Operation.CLOCK, []).number / 1e9

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are supported."""
        return True

    def _call(
        self, operation: Operation, parts: Sequence[str | bytes], number: int = 0, timeout: timedelta | None = None
    ) -> Message:
        timeout = self.timeout if timeout is None else timeout  # type: ignore[attr-defined] # torch's stub lacks it
        seconds = float(timeout.total_seconds())
        encoded = [part.encode() if isinstance(part, str) else part for part in parts]
        try:
            return self._pool.exchange(Message(operation, number, encoded), seconds)
        except (OSError, ProtocolError) as error:
            if not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:  # the latter: its node is gone
                raise dist.DistNetworkError(
                    f"the job's store at {format_address(self.address)}: {explain_error(error)}"
                ) from None
        keys = self._find_missing(encoded) if operation in (Operation.GET, Operation.WAIT) else encoded[:1]
        raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {_list_keys(keys)}")

    def _find_missing(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return which keys have no value, for an error message; all of them if the server does not answer."""
        try:
            return self._pool.exchange(Message(Operation.MISSING, 0, keys), _DIAGNOSIS_SECONDS).parts or keys
        except (OSError, ProtocolError, dist.DistError):
            return keys


class _Clone(JobStore):
    """A store that shares the connections of another one."""

    def __init__(self, original: JobStore) -> None:
        dist.Store.__init__(self)
        self.set_timeout(original.timeout)  # type: ignore[attr-defined] # torch's stub lacks it
        self.address, self._secret, self._server = original.address, original._secret, None
        self._pool = original._pool
        self._pool.clones.append(self)  # the Python half lives as long as that of the original


def _list_keys(keys: Sequence[bytes]) -> str:
    return join_first([key.decode(errors="replace") for key in keys], _KEYS_NAMED)
