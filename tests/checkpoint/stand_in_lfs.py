#!/usr/bin/env python3
"""A stand-in for Lustre's `lfs`, to be put on PATH under that name: setstripe, getstripe, df on any file system.

It behaves like the real one, including errors and exit codes, and needs only Python's standard library. Layouts are
kept in $STAND_IN_LFS/layouts.json, and every call is a line of $STAND_IN_LFS/calls.jsonl. Its servers are what
$STAND_IN_LFS/servers.json says (all keys optional):

    osts 8, inactive [], pools {}, progressive true, dom true: what there is
    dialect: old, where getstripe prints as it once did
    mode: hang, hang-with-child, garbage, garbage-error, restricted, denied, not-lustre
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

HOME = Path(os.environ["STAND_IN_LFS"])
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
EACCES, EEXIST, EINVAL, ENOTTY, EOPNOTSUPP, EREMOTEIO = 13, 17, 22, 25, 95, 121


def main(arguments: list[str]) -> int:
    with (HOME / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    servers = {"osts": 8, "inactive": [], "pools": {}, "progressive": True, "dom": True, "mode": "", **read("servers")}
    misbehave(servers["mode"])
    verb = {"setstripe": setstripe, "getstripe": getstripe, "df": df}.get(arguments[0])
    if verb is None:
        fail(f"lfs: '{arguments[0]}' is not a valid command", EINVAL)
    return verb(arguments[1:], servers)


def misbehave(mode: str) -> None:
    if mode == "hang-with-child":  # a child that keeps the output open, and outlives its parent
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    if mode.startswith("hang"):
        time.sleep(3600)
    if mode == "garbage":
        sys.stdout.buffer.write(b"\xff\xfe\x00 lmm_stripe_count \x1b[31m: many\n" * 3)
        sys.stdout.flush()
        sys.exit(0)
    if mode == "garbage-error":
        sys.stderr.buffer.write(b"\xff\xfe\x1b[31mLBUG\n\n" * 99)
        sys.exit(3)


def fail(text: str, code: int) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(code)


def read(name: str) -> dict[str, Any]:
    path = HOME / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


# setstripe


def setstripe(arguments: list[str], servers: dict[str, Any]) -> int:
    path, components, delete = parse_setstripe(arguments)
    if servers["mode"] == "not-lustre":
        if not os.path.isdir(path):  # noqa: PTH112
            open(path, "a").close()  # noqa: PTH123 - it is opened before the layout is set
        complain(path, "Inappropriate ioctl for device", ENOTTY)
    if servers["mode"] == "denied":
        complain(path, "Permission denied", EACCES)
    if servers["mode"] == "restricted":
        warning = "Setstripe is restricted by your administrator, default striping applied"
        print(f"lfs setstripe: setstripe warning for '{path}': {warning}", file=sys.stderr)
        return 0
    layouts = read("layouts")
    if os.path.isfile(path):  # noqa: PTH113
        complain(path, "stripe already set", EEXIST)
    check(path, components, servers)
    if not os.path.isdir(path):  # noqa: PTH112
        open(path, "x").close()  # noqa: PTH123
    layouts.pop(key(path), None)
    if not delete:
        layouts[key(path)] = components
    (HOME / "layouts.json").write_text(json.dumps(layouts))
    return 0


def complain(path: str, why: str, code: int) -> NoReturn:
    fail(f"lfs setstripe: setstripe error for '{path}': {why}", code)


def parse_setstripe(arguments: list[str]) -> tuple[str, list[dict[str, Any]], bool]:
    """Return (path, components, whether the layout is to be deleted). A component inherits from the one before what its
    options leave out.
    """
    components: list[dict[str, Any]] = []
    options: dict[str, Any] = {}
    words, path, delete = iter(arguments), "", False
    for word in words:
        if word == "-E":
            if components:
                components[-1].update(options)
            components.append({"start": components[-1]["end"] if components else 0, "end": extent(next(words))})
            options = {} if options.get("pattern") == "mdt" else dict(options)
        elif word == "-d":
            delete = True
        elif word in ("-c", "-S", "-p", "-L", "-o", "-C"):
            options |= option(word, next(words))
        else:
            path = word
    components = components or [{"start": 0, "end": -1}]
    components[-1].update(options)
    return (
        path,
        [
            {"count": 1, "size": 1 << 20, "pool": "", "pattern": "raid0", "on": []} | component
            for component in components
        ],
        delete,
    )


def option(word: str, value: str) -> dict[str, Any]:
    if word == "-S":
        return {"size": stripe_size(value)}
    if word == "-o":
        wanted = [int(index) for index in value.split(",")]
        return {"on": wanted, "count": len(wanted)}
    if word == "-L":
        return {"pattern": value, "count": 0}
    if word == "-p":
        return {"pool": value.rpartition(".")[2]}
    return {"count": int(value), "pattern": "raid0,overstriped" if word == "-C" else "raid0"}


def size_of(text: str) -> int:
    number, unit = (text[:-1], text[-1].lower()) if text[-1].isalpha() else (text, "")
    value = int(number) * UNITS.get(unit, 1)
    return value * 1024 if not unit and 0 < value < 4096 else value


def extent(text: str) -> int:
    return -1 if text.lower() in ("-1", "eof") else size_of(text)


def stripe_size(text: str) -> int:
    size = size_of(text)
    if size % 65536:
        wrong = f"bad stripe_size {size}, must be an even multiple of 65536 bytes"
        fail(f"lfs setstripe: error: {wrong}: Invalid argument ({EINVAL})", EINVAL)
    if size >= 1 << 32:
        fail(f"lfs setstripe: error: stripe size '{size}' over 4GB limit: Invalid argument ({EINVAL})", EINVAL)
    return size


def check(path: str, components: list[dict[str, Any]], servers: dict[str, Any]) -> None:
    """Fail with the errors that only the servers can notice."""
    if len(components) > 1 and not servers["progressive"]:
        complain(path, "Operation not supported", EOPNOTSUPP)
    if any(component["pattern"] == "mdt" for component in components) and not servers["dom"]:
        complain(path, "Invalid argument", EINVAL)
    for component in components:
        if component["pool"] and component["pool"] not in servers["pools"]:
            complain(path, f"pool '{component['pool']}' does not exist", EINVAL)
        if set(component["on"]) & set(servers["inactive"]):
            complain(path, f"inactive OST among your specified {len(component['on'])} OST(s)", EREMOTEIO)
        if component["end"] != -1 and component["pattern"] != "mdt" and component["end"] % component["size"]:
            complain(path, "Invalid argument", EINVAL)


# getstripe


def getstripe(arguments: list[str], servers: dict[str, Any]) -> int:
    from getstripe_forms import Form, render  # beside the real file of this script

    path = arguments[-1]
    if not os.path.exists(path):  # noqa: PTH110
        fail(f"lfs getstripe: error: getstripe failed for {path}: No such file or directory", 2)
    components = inherited(path)
    is_directory = os.path.isdir(path)  # noqa: PTH112
    for number, component in enumerate(components):
        component["osts"] = [] if is_directory else objects(component, number, servers)
    old = servers.get("dialect") == "old" and len(components) == 1
    form = Form(yaml="-y" in arguments, old=old, directory=is_directory)
    sys.stdout.write(render(path, components, form))
    return 0


def inherited(path: str) -> list[dict[str, Any]]:
    """Return a path's own layout, or that of the nearest directory above it that has one."""
    layouts = read("layouts")
    while key(path) not in layouts and path != "/":
        path = os.path.dirname(path)  # noqa: PTH120
    return layouts.get(key(path)) or parse_setstripe([path])[1]


def key(path: str) -> str:
    """Return a key of the path that stays the same when it is renamed."""
    found = os.stat(path)  # noqa: PTH116
    return f"{found.st_dev}:{found.st_ino}"


def objects(component: dict[str, Any], number: int, servers: dict[str, Any]) -> list[int]:
    """Return a component's OSTs. Before a write only the first component has objects, and one on the MDT has none."""
    if number or component["pattern"] == "mdt":
        return []
    there = servers["pools"].get(component["pool"]) or range(servers["osts"])
    active = [index for index in there if index not in servers["inactive"]]
    return component["on"] or (active if component["count"] == -1 else active[: max(component["count"], 1)])


# df


def df(arguments: list[str], servers: dict[str, Any]) -> int:
    indices = range(servers["osts"])
    if arguments[0] == "-p":
        if arguments[1].rpartition(".")[2] not in servers["pools"]:
            fail(f"lfs df: error: cannot find pool '{arguments[1]}'", 2)
        indices = servers["pools"][arguments[1].rpartition(".")[2]]
    print(f"{'UUID':<24} {'1K-blocks':>11} {'Used':>11} {'Available':>11} Use% Mounted on")
    print(df_row("stand-MDT0000", "/mnt/stand[MDT:0]"))
    for index in indices:
        if index in servers["inactive"]:
            print(f"OST{index:04x}             : inactive device")
        else:
            print(df_row(f"stand-OST{index:04x}", f"/mnt/stand[OST:{index}]"))
    print("\n" + df_row("filesystem_summary:", "/mnt/stand").replace("_UUID", ""))
    return 0


def df_row(name: str, mount: str) -> str:
    return f"{name + '_UUID':<24} {1 << 30:>11} {1 << 20:>11} {(1 << 30) - (1 << 20):>11}   1% {mount}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main(sys.argv[1:]))
