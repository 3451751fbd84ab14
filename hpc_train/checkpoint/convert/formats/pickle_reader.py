"""Read a pickle as data, without running any code from it.

torch.save and torch.distributed.checkpoint write pickles. Python's own reader imports what a pickle names and calls it,
so we interpret the opcodes ourselves. A name becomes a `PickledName`, a call an unevaluated `PickledCall`; nothing is
imported, called or given attributes. Names that are not in an exact list are refused, and so is every opcode that those
two writers do not use. Dictionaries stay lists of pairs, because hashing hostile keys can take for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.garbage_collection import pause_gc

MAX_PICKLE_OBJECTS = 2_000_000
"""Limit on the containers that a pickle makes and on the values that it memoizes, of about 100 bytes each."""
_MAX_STACK = 200_000
_LONGEST_INTEGER = 64
"""Maximum bytes of an integer."""


class PickleError(CheckpointError):
    """The pickle is damaged, or not of the kind that torch writes."""


class ForbiddenError(PickleError):
    """The pickle is more than data: loading it could run code."""


@dataclass(frozen=True, slots=True)
class PickledName:
    """A class or a function that a pickle names. It is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class PickledCall:
    """An object that a pickle would make by calling something. It is not called."""

    function: PickledName
    args: tuple[Any, ...]
    state: Any = None
    """State that BUILD gives to the object."""
    items: PickledPairs | None = None
    """Items that SETITEM sets in the object, as in an OrderedDict."""


@dataclass(eq=False, slots=True)
class PickledPairs:
    """A dictionary, as (key, value) pairs in the order in which they were set."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def by_name(self) -> dict[str, Any]:
        """Return the entries whose key is text; the last of equal keys counts."""
        return {key: value for key, value in self.pairs if type(key) is str}


@dataclass(eq=False, slots=True)
class PickledReference:
    """An object stored beside the pickle, named by its identifier."""

    identifier: Any


class _Mark:
    """Marks the start of the arguments of an opcode that takes many."""


_MARK = _Mark()


class PickleContents(NamedTuple):
    """Result of `read_pickle`."""

    value: Any
    end: int
    """First byte after the pickle."""
    persistent: list[PickledReference]
    """All persistent objects, in the order in which they came."""


def read_pickle(
    data: bytes, allowed: Collection[tuple[str, str]], begin: int = 0, most: int = MAX_PICKLE_OBJECTS
) -> PickleContents:
    """Read one pickle that begins at byte `begin`.

    The value is made of None, bool, int, float, str, bytes, tuple, list (for sets too), PickledPairs, PickledName,
    PickledCall and PickledReference. It may contain itself and share parts: bound every walk over it.
    allowed: the exact (module, name) pairs that may be named. most: see MAX_PICKLE_OBJECTS.
    Raises ForbiddenError for other names and for opcodes that only make sense to run code, PickleError for damage.
    """
    reader = _Reader(data, allowed, begin, most)
    try:
        with pause_gc():
            return PickleContents(reader.run(), reader.at, reader.persistent)
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise PickleError(f"not a pickle ({type(error).__name__} at byte {reader.at})") from None


class _Reader:
    """The stack machine of Python's pickle module, for plain values only."""

    _steps: ClassVar[dict[int, Callable[[_Reader], None]]] = {}

    def __init__(self, data: bytes, allowed: Collection[tuple[str, str]], begin: int, most: int) -> None:
        self._data, self._allowed, self.at, self._most = data, allowed, begin, most
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._names: dict[tuple[str, str], PickledName] = {}
        self._objects = 0
        self.persistent: list[PickledReference] = []

    def run(self) -> Any:
        data, steps, end = self._data, self._steps, len(self._data)
        while self.at < end:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                (value,) = self._stack
                if value is _MARK:
                    raise ValueError("a mark is not a value")
                return value
            step = steps.get(code)
            if step is None:
                raise self._refused(code)
            step(self)
            if len(self._stack) > _MAX_STACK or max(len(self._memo), self._objects) > self._most:
                raise PickleError("a pickle of more objects than we read")
        raise IndexError("no end")

    def _refused(self, code: int) -> PickleError:
        if code in _RUNNING:
            return ForbiddenError(f"Unsupported operand {_RUNNING[code]}")
        return PickleError(f"not a pickle (byte {code} at {self.at - 1} is not an opcode that torch writes)")

    # Helpers of the opcodes

    def _take(self, size: int) -> bytes:
        begin, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise IndexError("past the end")
        return self._data[begin : self.at]

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack(self._take(form.size))
        return int(value)

    def _line(self) -> str:
        # Bounded: without it a pickle without line feeds would be searched to its end for each opcode.
        end = self._data.index(b"\n", self.at, self.at + 1000)
        text, self.at = self._data[self.at : end].decode(), end + 1
        return text

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark is not a value")
        return value

    def _top(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:
            raise ValueError("a mark is not a value")
        return value

    def _since_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError("no mark")
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _push(self, value: Any) -> None:
        self._objects += 1
        self._stack.append(value)

    def _tuple(self, size: int) -> None:
        values = tuple(self._stack[-size:])
        if len(values) < size or any(value is _MARK for value in values):
            raise ValueError("a tuple of fewer values than it has")
        del self._stack[-size:]
        self._push(values)

    def _remember(self, key: int) -> None:
        self._memo[key] = self._top()

    def _recall(self, key: int) -> None:
        self._stack.append(self._memo[key])

    def _check_protocol(self) -> None:
        if self._take(1)[0] > 5:
            raise ValueError("a newer protocol")

    def _check_frame(self) -> None:
        if self._number(_EIGHT) > len(self._data) - self.at:
            raise IndexError("a frame past the end")

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ForbiddenError("a name that is not text")
        if (module, name) not in self._allowed:
            raise ForbiddenError(f"Unsupported global: {_printable(module)}.{_printable(name)}")
        # One object for a name, however often it comes: pickles of
        # large models name the same functions a million times.
        self._push(self._names.setdefault((module, name), PickledName(module, name)))

    def _call(self, function: Any, args: Any) -> None:
        if type(function) is not PickledName or type(args) is not tuple:
            raise ForbiddenError("a call of something that is not a function")
        self._push(PickledCall(function, args))

    def _name_from_stack(self) -> None:
        name = self._pop()
        self._name(self._pop(), name)

    def _call_from_stack(self) -> None:
        args = self._pop()
        self._call(self._pop(), args)

    def _build(self) -> None:
        state, made = self._pop(), self._top()
        if type(made) is not PickledCall or made.state is not None:
            raise ForbiddenError("a state for what has none")
        made.state = state

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise ForbiddenError("items for something that is not a list")
        target += values

    def _append(self) -> None:
        item = self._pop()
        self._extend([item])

    def _set_one(self) -> None:
        item = self._pop()
        self._set([self._pop(), item])

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is PickledCall:
            target.items = target.items or PickledPairs()
            target = target.items
        if type(target) is not PickledPairs or len(values) % 2:
            raise ForbiddenError("items for something that is not a dictionary")
        target.pairs += zip(values[::2], values[1::2], strict=True)

    def _refer(self) -> None:
        self.persistent.append(PickledReference(self._pop()))
        self._push(self.persistent[-1])

    def _integer(self, size: int) -> None:
        if size > _LONGEST_INTEGER:
            raise PickleError(f"an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _text(self, size: int) -> None:
        self._stack.append(self._take(size).decode())

    def _old_text(self, size: int) -> None:
        """Push a string of Python 2."""
        self._stack.append(self._take(size).decode("latin-1"))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:100])


_ONE, _TWO, _FOUR, _EIGHT = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_SIGNED, _REAL = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")
_RUNNING = {
    ord("i"): "INST",
    ord("o"): "OBJ",
    ord("P"): "PERSID",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x92: "NEWOBJ_EX",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}
"""Forbidden opcodes: they make objects in ways that torch does not write, or use tables outside the pickle."""


Step = Callable[[_Reader], None]


def _push_constant(constant: Any) -> Step:
    return lambda r: r._stack.append(constant)


def _list_value_opcodes() -> dict[str, Step]:
    """Return the opcodes of numbers and texts, and those that frame a pickle."""
    return {
        "\x80": _Reader._check_protocol,
        "\x95": _Reader._check_frame,
        "N": _push_constant(None),
        "\x88": _push_constant(True),
        "\x89": _push_constant(False),
        "K": lambda r: r._stack.append(r._number(_ONE)),
        "M": lambda r: r._stack.append(r._number(_TWO)),
        "J": lambda r: r._stack.append(r._number(_SIGNED)),
        "\x8a": lambda r: r._integer(r._number(_ONE)),
        "\x8b": lambda r: r._integer(r._number(_FOUR)),
        "G": lambda r: r._stack.append(_REAL.unpack(r._take(8))[0]),
        "X": lambda r: r._text(r._number(_FOUR)),
        "\x8c": lambda r: r._text(r._number(_ONE)),
        "\x8d": lambda r: r._text(r._number(_EIGHT)),
        "U": lambda r: r._old_text(r._number(_ONE)),
        "T": lambda r: r._old_text(r._number(_FOUR)),
        "C": lambda r: r._stack.append(r._take(r._number(_ONE))),
        "B": lambda r: r._stack.append(r._take(r._number(_FOUR))),
        "\x8e": lambda r: r._stack.append(r._take(r._number(_EIGHT))),
        "\x96": lambda r: r._stack.append(r._take(r._number(_EIGHT))),
    }


def _list_container_opcodes() -> dict[str, Step]:
    """Return the opcodes of the stack, and of tuples, lists, sets and dictionaries."""
    return {
        "(": _push_constant(_MARK),
        "0": lambda r: r._stack.__delitem__(-1),
        "1": lambda r: r._since_mark().clear(),
        "]": lambda r: r._push([]),
        "\x8f": lambda r: r._push([]),
        ")": _push_constant(()),
        "}": lambda r: r._push(PickledPairs()),
        "t": lambda r: r._push(tuple(r._since_mark())),
        "\x85": lambda r: r._tuple(1),
        "\x86": lambda r: r._tuple(2),
        "\x87": lambda r: r._tuple(3),
        "\x91": lambda r: r._push(r._since_mark()),
        "a": _Reader._append,
        "e": lambda r: r._extend(r._since_mark()),
        "\x90": lambda r: r._extend(r._since_mark()),
        "s": _Reader._set_one,
        "u": lambda r: r._set(r._since_mark()),
    }


def _list_object_opcodes() -> dict[str, Step]:
    """Return the opcodes of the memo, and of names, calls and objects beside the pickle."""
    return {
        "q": lambda r: r._remember(r._number(_ONE)),
        "r": lambda r: r._remember(r._number(_FOUR)),
        "\x94": lambda r: r._remember(len(r._memo)),
        "h": lambda r: r._recall(r._number(_ONE)),
        "j": lambda r: r._recall(r._number(_FOUR)),
        "c": lambda r: r._name(r._line(), r._line()),
        "\x93": _Reader._name_from_stack,
        "R": _Reader._call_from_stack,
        "\x81": _Reader._call_from_stack,
        "b": _Reader._build,
        "Q": _Reader._refer,
    }


# Every opcode that torch.save and DCP write, with any protocol; each step checks its operands.
_Reader._steps = {
    ord(code): step
    for code, step in {**_list_value_opcodes(), **_list_container_opcodes(), **_list_object_opcodes()}.items()
}
