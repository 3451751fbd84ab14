"""Model what a disk may hold after a power failure: any order and part of the changes that were not synchronised.

After the model of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018), as strict as POSIX:
- bytes of a file are on the disk once the file has been synchronised after they were written; until then each write
  and each change of size may be there, be missing, or (a write) be there by half, whatever came before or after it;
- a name is on the disk once its directory has been synchronised after it was made, moved or removed; until then each
  change of names may be there or be missing. One rename is one change: both of its names, or none.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from faults import of_descriptor, path_of


@dataclass(frozen=True)
class Operation:
    """A system call that has returned."""

    at: float
    """time.monotonic(), the same for all processes of a machine."""
    name: str
    path: Path
    other: Path | None = None
    data: bytes = b""
    offset: int = 0


@contextmanager
def recorded(root: Path) -> Iterator[list[Operation]]:
    """Record what this process does to the files below `root`, in order."""
    seen: list[Operation] = []

    def note(name: str, path: Path, other: Path | None = None, data: bytes = b"", offset: int = 0) -> None:
        if path.is_relative_to(root):
            seen.append(Operation(time.monotonic(), name, path, other, data, offset))

    with ExitStack() as stack:
        for name, wrap in _WRAPPERS.items():
            stack.enter_context(patch.object(os, name, wrap(name, getattr(os, name), note)))
        yield seen


Note = Callable[..., None]


def _by_path(name: str, real: Callable[..., Any], note: Note) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        path = path_of(name, args, named)
        answer = real(*args, **named)
        note(name, path)
        return answer

    return call


def _of_two(name: str, real: Callable[..., Any], note: Note) -> Callable[..., Any]:
    def call(source: Any, target: Any) -> None:
        real(source, target)
        note(name, Path(source), Path(target))

    return call


def _open(name: str, real: Callable[..., int], note: Note) -> Callable[..., int]:
    def call(*args: Any, **named: Any) -> int:
        path = path_of(name, args, named)
        new = bool(args[1] & os.O_CREAT) and not path.exists()
        descriptor = real(*args, **named)
        if new:
            note("create", path)
        return descriptor

    return call


def _by_descriptor(name: str, real: Callable[..., Any], note: Note) -> Callable[..., Any]:
    def call(descriptor: int, *args: Any) -> Any:
        path = of_descriptor(descriptor)
        answer = real(descriptor, *args)
        if name == "pwrite":
            note(name, path, data=bytes(args[0][:answer]), offset=args[1])
        elif name == "fsync":
            note(name, path)
        else:
            note("resize", path, offset=max(args[-1], 0))
        return answer

    return call


_WRAPPERS: dict[str, Callable[[str, Callable[..., Any], Note], Callable[..., Any]]] = {
    "mkdir": _by_path,
    "unlink": _by_path,
    "rmdir": _by_path,
    "rename": _of_two,
    "replace": _of_two,
    "link": _of_two,
    "open": _open,
    "pwrite": _by_descriptor,
    "ftruncate": _by_descriptor,
    "posix_fallocate": _by_descriptor,
    "fsync": _by_descriptor,
}


@dataclass(eq=False)
class Node:
    """A file or a directory: its state that is certainly on the disk, and the changes that may be."""

    is_directory: bool
    names: dict[str, Node] = field(default_factory=dict)
    """As the running system sees them."""
    content: bytearray = field(default_factory=bytearray)
    safe: dict[str, Node] = field(default_factory=dict)
    safe_content: bytes = b""


@dataclass(frozen=True)
class Change:
    """A change that is not synchronised: to the names of a directory, or to the bytes of a file."""

    node: Node
    names: tuple[tuple[str, Node | None], ...] = ()
    operation: Operation | None = None


@dataclass
class Disk:
    """A directory tree that results from operations."""

    root_path: Path
    root: Node = field(default_factory=lambda: Node(True))
    pending: list[Change] = field(default_factory=list)

    @classmethod
    def holding(cls, root_path: Path) -> Disk:
        """Return the present tree as if all of it were synchronised."""
        disk = cls(root_path)
        disk.root = _read(root_path)
        return disk

    def apply(self, operation: Operation) -> None:
        """Apply one more operation."""
        parent, name = operation.path.parent, operation.path.name
        if operation.name in ("create", "mkdir"):
            self._rename(self._at(parent), [(name, Node(operation.name == "mkdir"))])
        elif operation.name in ("unlink", "rmdir"):
            self._rename(self._at(parent), [(name, None)])
        elif operation.name in ("rename", "replace", "link"):
            self._move(operation)
        elif operation.name == "fsync":
            self._synchronise(self._at(operation.path))
        else:
            node = self._at(operation.path)
            _write(node.content, operation, len(operation.data))
            self.pending.append(Change(node, operation=operation))

    def _move(self, operation: Operation) -> None:
        assert operation.other is not None
        parent, target = self._at(operation.path.parent), self._at(operation.other.parent)
        node = parent.names[operation.path.name]
        if operation.name == "link":  # one more name of the same file, whose bytes are as safe as they were
            self._rename(target, [(operation.other.name, node)])
            return
        assert target is parent, "a rename to another directory is two changes"
        self._rename(parent, [(operation.other.name, node), (operation.path.name, None)])

    def _rename(self, parent: Node, names: list[tuple[str, Node | None]]) -> None:
        _set(parent.names, names)
        self.pending.append(Change(parent, names=tuple(names)))

    def _synchronise(self, node: Node) -> None:
        for change in self.pending:
            if change.node is node:
                _set(node.safe, change.names)
        node.safe_content = bytes(node.content)
        self.pending = [change for change in self.pending if change.node is not node]

    def _at(self, path: Path) -> Node:
        node = self.root
        for name in path.relative_to(self.root_path).parts:
            node = node.names[name]
        return node

    def states(self, most: int, drawn: random.Random) -> Iterator[dict[str, bytes | None]]:
        """Return the states that may be found: path -> content, None for a directory. These are all states, or a
        selection of at most `most`.
        """
        for kept in _choices(len(self.pending), most, drawn):
            yield self._found([(change, kept[index]) for index, change in enumerate(self.pending)])

    def _found(self, kept: Sequence[tuple[Change, float]]) -> dict[str, bytes | None]:
        """Return the state in which so much of each change is on the disk: 0, 1/2 (of a write) or 1."""
        found: dict[str, bytes | None] = {}

        def visit(node: Node, path: str) -> None:
            mine = [(change, part) for change, part in kept if change.node is node and part]
            if not node.is_directory:
                content = bytearray(node.safe_content)
                for change, part in mine:
                    assert change.operation is not None
                    _write(content, change.operation, int(len(change.operation.data) * part))
                found[path] = bytes(content)
                return
            found[path] = None
            names: dict[str, Node] = dict(node.safe)
            for change, _ in mine:
                _set(names, change.names)
            for name, child in names.items():
                visit(child, f"{path}/{name}" if path else name)

        visit(self.root, "")
        return found


def _read(path: Path) -> Node:
    if path.is_file():
        data = path.read_bytes()
        return Node(False, content=bytearray(data), safe_content=data)
    names = {entry.name: _read(entry) for entry in path.iterdir()}
    return Node(True, names=names, safe=dict(names))


def _set(names: dict[str, Node], changes: Sequence[tuple[str, Node | None]]) -> None:
    for name, node in changes:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _write(content: bytearray, operation: Operation, count: int) -> None:
    if operation.name == "resize":
        del content[operation.offset :]
        content.extend(bytes(operation.offset - len(content)))
        return
    if count:
        end = operation.offset + count
        content.extend(bytes(max(0, end - len(content))))
        content[operation.offset : end] = operation.data[:count]


def violations(
    before: Disk,
    operations: Sequence[Operation],
    problem: Callable[[Path, bool], str | None],
    scratch: Path,
    most: int,
    last: int = 1000,
) -> list[str]:
    """Return the problems of all states that the disk may be in after any of the `last` operations.

    problem: finds what is wrong with a directory; its second argument tells whether all operations were made. most:
    states that are looked at after each operation.
    """
    drawn = random.Random(len(operations))
    wrong, seen = [], set()
    for number, operation in enumerate(operations, start=1):
        before.apply(operation)
        for found in before.states(most, drawn) if number > len(operations) - last else ():
            returned = number == len(operations)
            key = hash((returned, tuple(sorted(found.items()))))
            if key not in seen:
                seen.add(key)
                why = problem(put(found, scratch / "found"), returned)
                wrong += [f"after {number} ({operation.name} {operation.path.name}): {why}"] if why else []
                shutil.rmtree(scratch / "found")
    return wrong


def _choices(number: int, most: int, drawn: random.Random) -> Iterator[tuple[float, ...]]:
    """Return the combinations of how much of each change is on the disk."""
    if 3**number <= most:
        yield from itertools.product((0.0, 0.5, 1.0), repeat=number)
        return
    yield (1.0,) * number
    yield (0.0,) * number
    for index, (usual, other) in itertools.product(range(number), ((1.0, 0.0), (1.0, 0.5), (0.0, 1.0))):
        yield tuple(other if at == index else usual for at in range(number))
    for _ in range(most - 2 - 3 * number):
        yield tuple(drawn.choice((0.0, 0.5, 1.0)) for _ in range(number))


def put(found: dict[str, bytes | None], directory: Path) -> Path:
    """Write the files and directories of a state."""
    for name, content in found.items():  # a directory comes before what is in it
        path = directory / name if name else directory
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
    return directory
