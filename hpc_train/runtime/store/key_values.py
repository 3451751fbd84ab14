"""The keys and values of the job's store, and the requests that wait for keys. It knows nothing of connections.

A request waits for one missing key at a time: the value of that key wakes it, it looks for the next key that is
missing, and once there is none it is answered. So a value that arrives costs only what waits for it, however many
requests wait for others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_train.runtime.store.protocol import Message, Payload, ProtocolError, encode_message


@dataclass(eq=False)
class Request:
    """A `get` or `wait`, which is answered when all its keys have values."""

    keys: Sequence[bytes]
    answer: Callable[[], None]
    next_key: int = 0
    """Index of the first key that has not had a value yet."""
    missing: bytes | None = None
    """The key that it waits for now."""


class KeyValues:
    """Keys with their values. Not safe for threads: one thread serves all connections."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self.waiting: defaultdict[bytes, dict[Request, None]] = defaultdict(dict)
        """Requests by the missing key that each waits for, in order."""
        self._last_encoded: tuple[Sequence[bytes], Payload] | None = None

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def set(self, key: bytes, value: bytes) -> None:
        """Set a key, and answer the requests that it completes."""
        self._last_encoded = None
        self._values[key] = value
        for request in self.waiting.pop(key, ()):
            self.answer_when_complete(request)

    def append(self, key: bytes, value: bytes) -> None:
        """Append to the value of a key; a key without a value begins with none."""
        self.set(key, self._values.get(key, b"") + value)

    def add(self, key: bytes, number: int) -> int:
        """Add to a counter, 0 at first, and return its value. Raises ProtocolError if the key holds no number."""
        # Counters are text, as in torch's store, where `set` may have written them.
        before = self._values.get(key, b"0")
        if not before.removeprefix(b"-").isdigit() or len(before) > 20:
            raise ProtocolError("`add` to what is not a number")
        total = (int(before) + number + (1 << 63)) % (1 << 64) - (1 << 63)  # wraps around as an int64, as in torch's
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it holds what is expected, as torch's stores do.

        Returns what the key holds afterwards; `expected` if it holds nothing and something was expected.
        """
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self.set(key, desired)
            return desired
        return expected if current is None else current

    def delete(self, key: bytes) -> bool:
        """Remove a key; returns whether it had a value."""
        self._last_encoded = None
        return self._values.pop(key, None) is not None

    def encode(self, keys: Sequence[bytes]) -> Payload:
        """Encode the values of keys. All ranks of a group ask for the same ones: they share one copy."""
        if self._last_encoded is None or self._last_encoded[0] != keys:
            self._last_encoded = keys, encode_message(Message(0, 0, [self._values[key] for key in keys]))
        return self._last_encoded[1]

    def answer_when_complete(self, request: Request) -> None:
        """Answer a request if all its keys have values; otherwise keep it until they do."""
        request.missing = self._find_missing(request)
        if request.missing is None:
            request.answer()
        else:
            self.waiting[request.missing][request] = None

    def forget(self, request: Request) -> None:
        """Let a request no longer wait."""
        if request.missing is None or request.missing not in self.waiting:
            return
        self.waiting[request.missing].pop(request, None)
        if not self.waiting[request.missing]:
            del self.waiting[request.missing]

    def _find_missing(self, request: Request) -> bytes | None:
        """Return a key that has no value; None if all have one, also those that were seen earlier."""
        keys = request.keys
        while request.next_key < len(keys) and keys[request.next_key] in self._values:
            request.next_key += 1
        if request.next_key < len(keys):
            return keys[request.next_key]
        # All were there at some time, but one may have been deleted since: look at all of them once more.
        request.next_key = 0
        return next((key for key in keys if key not in self._values), None)
