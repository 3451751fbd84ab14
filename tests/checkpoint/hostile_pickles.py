"""Pickles that would run code in Python's own reader: each tries to make the file `canary`."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

FILESYSTEM = "torch.distributed.checkpoint.filesystem"
METADATA = "torch.distributed.checkpoint.metadata"


class CallOnLoad:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _stack_global(module: str, name: str) -> bytes:
    return _short(module) + _short(name) + b"\x93"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def programs(canary: Path) -> dict[str, bytes]:
    """Return the pickle of each trick, by its name."""
    import os

    command = f"touch {canary}"
    arg = _text(command)
    one = arg + b"\x85"
    found = {
        f"os.system, protocol {protocol}": pickle.dumps(CallOnLoad(os.system, command), protocol)
        for protocol in range(6)
    }
    found |= {
        f"{name}, protocol {protocol}": pickle.dumps({"w": call}, protocol)
        for protocol in range(6)
        for name, call in (
            ("eval", CallOnLoad(eval, f"__import__('os').system({command!r})")),
            ("Path.touch", CallOnLoad(Path.touch, canary)),
            ("getattr", CallOnLoad(getattr, CallOnLoad(__import__, "os"), "system")),
        )
    }
    dotted = [
        (FILESYSTEM, "os.system"),
        (METADATA, "os.system"),
        (FILESYSTEM, "FileSystemReader.__init__.__globals__"),
        (FILESYSTEM, "_StorageInfo.__init__"),
        (METADATA, "Metadata.__class__"),
        ("pathlib", "Path.touch"),
        ("pathlib", "PosixPath.touch"),
        ("torch", "os.system"),
        ("torch", "Size.__class__"),
        ("torch", "float32.__class__"),
        ("torch._utils", "torch.os.system"),
        ("torch.serialization", "os.system"),
        ("collections", "OrderedDict.fromkeys"),
        ("collections", "_sys.modules"),
        ("torch.distributed.checkpoint.filesystem.os", "system"),
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "exec"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch.jit", "load"),
        ("torch.utils.collect_env", "run"),
        ("numpy", "fromfile"),
        ("operator", "methodcaller"),
        ("functools", "partial"),
        ("copyreg", "_reconstructor"),
        ("copyreg", "add_extension"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._tensor", "_rebuild_from_type"),
    ]
    for module, name in dotted:
        found[f"STACK_GLOBAL {module} {name}"] = b"\x80\x04" + _stack_global(module, name) + one + b"R."
        found[f"GLOBAL {module} {name}"] = b"\x80\x02" + _global(module, name) + one + b"R."
    system = _global("os", "system")
    allowed = _global(METADATA, "Metadata")
    found |= {
        "INST": b"(" + f"S'{command}'\n".encode() + b"ios\nsystem\n.",
        "INST binary": b"\x80\x02(" + arg + b"ios\nsystem\n.",
        "OBJ": b"\x80\x02(" + system + arg + b"o.",
        "NEWOBJ": b"\x80\x02" + system + one + b"\x81.",
        "NEWOBJ_EX": b"\x80\x04" + _stack_global("os", "system") + one + b"}\x92.",
        "NEWOBJ_EX of an allowed class": b"\x80\x04" + _stack_global("torch", "Size") + b")}\x92.",
        "BUILD os.system": b"\x80\x02" + system + b"}b.",
        "BUILD on an allowed class": b"\x80\x02"
        + allowed
        + b"}"
        + _text("__setstate__")
        + system
        + b"sb"
        + one
        + b"R.",
        "BUILD slots of an allowed class": b"\x80\x02" + allowed + b"N}" + _text("x") + system + b"s\x86b.",
        "BUILD state __setstate__": b"\x80\x02"
        + allowed
        + b")\x81}"
        + _text("__setstate__")
        + system
        + b"sb"
        + arg
        + b"b.",
        "EXT1": b"\x80\x02\x82\x01" + one + b"R.",
        "EXT2": b"\x80\x02\x83\x01\x00" + one + b"R.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00" + one + b"R.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": b"\x80\x02" + system + one + b"RQ.",
        "names from the memo": b"\x80\x04"
        + _short("os")
        + b"\x940"
        + _short("system")
        + b"\x940h\x00h\x01\x93"
        + one
        + b"R.",
        "a name under another memo key": b"\x80\x04" + system + b"r\xff\xff\x00\x000j\xff\xff\x00\x00" + one + b"R.",
        "a frame that hides": b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00N0"
        + _stack_global("os", "system")
        + one
        + b"R.",
        "called by DUP": b"\x80\x02" + system + b"2" + one + b"R.",
        "a list of calls": b"\x80\x02](" + system + one + b"R" + b"e.",
        "items of an OrderedDict": b"\x80\x02"
        + _global("collections", "OrderedDict")
        + b")R"
        + _text("x")
        + system
        + one
        + b"Rs.",
        "after the end": b"\x80\x02N." + system + one + b"R.",
        "in a mark": b"\x80\x02((" + system + one + b"R1N.",
        "a string with a newline as a module": b"\x80\x04" + _stack_global("os\n", "system") + one + b"R.",
        "Python 2 names": b"\x80\x02"
        + _global("__builtin__", "eval")
        + _text(f"open({str(canary)!r},'w')")
        + b"\x85R.",
        "codecs": b"\x80\x02" + _global("_codecs", "encode") + _text("x") + _text("os.system") + b"\x86R.",
        "Path from parts": b"\x80\x02" + _global("pathlib", "PosixPath") + one + b"R}b.",
    }
    return found


def bombs() -> dict[str, bytes]:
    """Return pickles that exhaust the memory, the stack or the time of a reader that believes them."""
    double = b"]q\x00" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
    nested = b"".join(b"}q" + bytes([i % 250]) for i in range(200)) + b"0" * 199
    shared = b"}q\x00" + b"".join(
        b"}(" + _text("a") + b"h" + bytes([i]) + _text("b") + b"h" + bytes([i]) + b"uq" + bytes([i + 1])
        for i in range(60)
    )
    tuples = b")q\x00" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60))
    return {
        "deep lists": b"\x80\x02" + b"](" * 90_000 + b"e" * 90_000 + b".",
        "deep dictionaries": b"\x80\x02" + b"}(K\x01" * 60_000 + b"N" + b"u" * 60_000 + b".",
        "deep tuples": b"\x80\x02N" + b"\x85" * 300_000 + b".",
        "a dictionary in itself": b"\x80\x02}q\x00" + _text("x") + b"h\x00s.",
        "lists that double": b"\x80\x02" + double + b".",
        "dictionaries that double": b"\x80\x02" + shared + b".",
        "tuples that double, as a key": b"\x80\x02" + tuples + b"}h\x3cNs.",
        "nested": b"\x80\x02" + nested + b".",
        "a memo of 4 billion": b"\x80\x02Nr\xff\xff\xff\xff.",
        "half a character": b"\x80\x02}X\x03\x00\x00\x00\xed\xa0\x80Ns.",
        "a memo without end": b"\x80\x04N" + b"\x94" * 2_500_000 + b".",
        "bytes of 2^62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        "text of 2^62": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        "a frame of 2^62": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        "an array of 2^62": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.",
        "an integer of 2^31 bytes": b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
        "a negative length": b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
        "a bytearray of 2^40": b"\x80\x02"
        + _global("builtins", "bytearray")
        + b"\x8a\x06"
        + (1 << 40).to_bytes(6, "little")
        + b"\x85R.",
        "an endless name": b"\x80\x02c" + b"a" * 5_000_000,
        "no end": b"\x80\x02" + b"N" * 400_000,
        "nothing": b"",
        "only the protocol": b"\x80\x02",
        "empty stack": b"\x80\x020000.",
        "no mark": b"\x80\x02NNNe.",
    }
