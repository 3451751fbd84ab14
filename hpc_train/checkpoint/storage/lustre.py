"""Set and read the striping of files on Lustre, by the command `lfs` or the attribute `lustre.lov`.

The command may be missing, hang, or print anything. The attribute is the layout in the form of the kernel's client:
struct lov_user_md_v1, little-endian: magic, pattern (u32 each), object id (16 bytes), stripe size (u32), stripe count,
stripe offset (u16 each); v3 adds the name of the pool (16 bytes). Each object follows in 24 bytes: its id (16),
generation and OST index (u32 each). A failure here must not fail a save: callers warn once.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hpc_train.checkpoint.storage.stripe_layout import (
    ALL_OSTS,
    StripeComponent,
    StripeLayout,
    format_setstripe_arguments,
)
from hpc_train.units import BYTES_OF_SUFFIX

_PAIR = re.compile(r"([A-Za-z_.]+):\s*(\{|\S*)")
_ROW = re.compile(r"\s*(\d+)\s+\d+\s+0x[0-9a-f]+\s+(?:0x[0-9a-f]+|\d+)\s*\*?\s*")
"""A row of objects: obdidx, objid (decimal and hexadecimal), group, and a mark at the OST that was asked for."""
_OST = re.compile(r"l_ost_idx:\s*(\d+)")
_FIELDS = {
    "lmm_stripe_count": "count",
    "lmm_stripe_size": "size",
    "lmm_stripe_offset": "offset",
    "lmm_pattern": "pattern",
    "lmm_pool": "pool",
    "stripe_count": "count",
    "stripe_size": "size",
    "stripe_offset": "offset",
    "pattern": "pattern",
    "pool": "pool",
    "lcme_flags": "flags",
    "lcme_extent.e_end": "end",
}
_MDT = ("mdt", "2")


@dataclass(frozen=True)
class PlacedComponent:
    """A component and the OSTs that it lies on."""

    component: StripeComponent
    osts: tuple[int, ...] = ()
    """Indices of its OSTs in the order of the stripes; empty until its first byte is written."""
    first: int | None = None
    """Index of its first OST; None: any."""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileStriping:
    """The striping of a file, or of new files of a directory."""

    parts: tuple[PlacedComponent, ...]

    @property
    def layout(self) -> StripeLayout:
        """The layout alone, without the OSTs."""
        return tuple(part.component for part in self.parts)


@dataclass
class _PrintedComponent:
    """The values of one component as `lfs` printed them."""

    texts: dict[str, str] = field(default_factory=dict)
    osts: list[int] = field(default_factory=list)


def parse_getstripe(text: str, path: str = "") -> FileStriping:
    """Parse what `lfs getstripe` printed for one path. Raises ValueError, in one line, if it is no layout.

    path: the argument of the command, which most releases print first.
    """
    components = _list_components(text.removeprefix(f"{path}\n").splitlines())
    if not components or not all("count" in component.texts for component in components):
        raise ValueError("it printed no layout")
    return FileStriping(tuple(_parse_placed(component) for component in components))


def _list_components(lines: list[str]) -> list[_PrintedComponent]:
    components = [_PrintedComponent()]
    for line in lines:
        row, ost = _ROW.fullmatch(line), _OST.search(line)
        if row or ost:
            components[-1].osts.append(int((row or ost)[1]))  # type: ignore[index]
            continue
        for name, value in _list_pairs(line):
            # Each component of a progressive layout begins with its id.
            if name == "lcme_id" and (components[-1].texts or components[-1].osts):
                components.append(_PrintedComponent())
            if name in _FIELDS:
                components[-1].texts[_FIELDS[name]] = value
    return [component for component in components if component.texts]


def _list_pairs(line: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values in a line; most have one pair, the line of a directory has all."""
    for match in _PAIR.finditer(line):
        yield match[1], match[2]


def _parse_placed(printed: _PrintedComponent) -> PlacedComponent:
    texts = printed.texts
    # Newer releases print words, older ones a number: 2 is the metadata server.
    on_mdt = not {*texts.get("pattern", "raid0").split(",")}.isdisjoint(_MDT)
    component = StripeComponent(
        end=None if texts.get("end", "EOF") == "EOF" else _number(texts["end"]),
        count=_number(texts["count"]),
        size=(_number(texts.get("size", "0")) or None) if not on_mdt else None,
        pool=texts.get("pool") or None,
        on_mdt=on_mdt,
    )
    first = _number(texts["offset"]) if "offset" in texts else -1
    flags = tuple(flag for flag in texts.get("flags", "").split(",") if flag not in ("", "0", "N/A"))
    return PlacedComponent(component, tuple(printed.osts), first if first >= 0 else None, flags)


def _number(text: str) -> int:
    """Parse a number, with a sign or a unit (`1M`); -1 may be printed as 16 or 32 unsigned bits."""
    match = re.fullmatch(r"(-?\d+)([KMGT]?)", text)
    if not match:
        raise ValueError(f"{text!r} is not a number")
    value = int(match[1]) * BYTES_OF_SUFFIX[match[2]]
    # Stripe counts are unsigned on the disk; all bits set means all OSTs.
    return -1 if value in (0xFFFF, 0xFFFFFFFF) else value


LFS_TIMEOUT = 20.0
"""Seconds until `lfs` is taken to hang, as it does while a server is away."""
LOV_ROOTS = (Path("/sys/fs/lustre/lov"), Path("/proc/fs/lustre/lov"))
"""Directories in which the kernel's Lustre client shows its connections, in newer and older releases."""
_OST_LINE = re.compile(r"\[OST:\d+\]")
_LONGEST = 200


class LfsError(Exception):
    """Failure of `lfs`; the text is one line."""

    def __init__(self, text: str, code: int | None = None, missing: bool = False) -> None:
        super().__init__(text)
        self.code = code
        """Exit code; None if the command could not be run or was killed."""
        self.missing = missing
        """Whether there is no such command."""


@dataclass(frozen=True)
class LfsAnswer:
    """Output of a successful run of `lfs`."""

    out: str
    warning: str
    """One line; empty if there was none."""


def run_lfs(arguments: list[str], seconds: float = LFS_TIMEOUT) -> LfsAnswer:
    """Run `lfs`. Raises LfsError.

    Its output goes to files, not pipes, and a hanging process is killed but not waited for: while it waits for a server
    it takes no signals, and it or its children would keep a pipe open.
    """
    command = shutil.which("lfs")
    if command is None:
        raise LfsError("the command lfs is not on PATH", missing=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                [command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise LfsError(f"lfs cannot be run: {error.strerror}") from error
        code = _get_code(process, arguments[0], seconds)
        output, errors = (_get_text(file) for file in (out, err))
    line = _join_lines(errors)
    if code:
        raise LfsError(f"lfs {arguments[0]}: exit {code}: {line or _join_lines(output) or 'no reason given'}", code)
    return LfsAnswer(output, line)


def set_stripe_layout(path: Path, layout: StripeLayout, seconds: float = LFS_TIMEOUT) -> str:
    """Set the layout of a new file, or of new files of a directory; returns a warning or an empty string.

    Raises LfsError, with code 17 (EEXIST) for a file that has a layout, even an empty file.
    """
    return run_lfs(["setstripe", *format_setstripe_arguments(layout), str(path.absolute())], seconds).warning


def get_stripe_layout(path: Path) -> FileStriping:
    """Read the striping of a file, or of new files of a directory. Raises LfsError, also if there is no layout."""
    flags = ["-d"] if path.is_dir() else []
    try:
        answer = run_lfs(["getstripe", *flags, str(path.absolute())], LFS_TIMEOUT)
        return parse_getstripe(answer.out, str(path.absolute()))
    except ValueError as error:
        raise LfsError(f"lfs getstripe: {error}") from error


def count_osts(path: Path, source: str = "", pool: str | None = None, seconds: float = LFS_TIMEOUT) -> int | None:
    """Count the OSTs that files of a directory may use; None if that cannot be found out.

    source: of the mount, `<servers>:/<name>`; names the file system if `lfs` fails and the kernel is asked.
    """
    try:
        listed = run_lfs(["df", *(["-p", pool] if pool else []), str(path.absolute())], seconds).out
    except LfsError:
        return None if pool else _count_osts_in_kernel(source.rpartition("/")[2])
    return sum(1 for line in listed.splitlines() if _OST_LINE.search(line)) or None


def _count_osts_in_kernel(name: str) -> int | None:
    """Read lov.<name>-*.numobd, as `lctl get_param` does."""
    for root in LOV_ROOTS:
        for path in sorted(root.glob(f"{name}-*/numobd")) if name else ():
            with suppress(OSError, ValueError):
                return int(path.read_text()) or None
    return None


def _get_code(process: subprocess.Popen[bytes], what: str, seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            # The whole group: lfs may have started others that hang as well.
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        raise LfsError(f"lfs {what}: no answer in {seconds:g} s") from None


def _get_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1 << 24).decode(errors="replace")


def _join_lines(text: str) -> str:
    """Return the text as one short, printable line, without the prefix of `lfs`."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(plain.split()).removeprefix("lfs setstripe: ").removeprefix("error: ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


LOV_ATTRIBUTE = "lustre.lov"
"""Extended attribute by which a directory is given its striping where there is no `lfs`."""
_V1, _V3 = 0x0BD10BD0, 0x0BD30BD0
"""LOV_USER_MAGIC_V1 and _V3 of lustre_user.h: without a pool, and with one."""
_HEADER = struct.Struct("<II16sIHH")
_POOL = struct.Struct("<16s")
_RAID0 = 1
"""Pattern of plain striping."""
_ANY = 0xFFFF
"""As a stripe count all OSTs, as an offset any first OST."""
_LONGEST_POOL = 15
"""Bytes of a pool's name; the sixteenth of its field is a zero."""


def set_lov_attribute(path: Path, layout: StripeLayout, name: str = LOV_ATTRIBUTE) -> None:
    """Set the layout of new files of a directory. Raises OSError, and ValueError for a layout that only `lfs` can set.

    For directories only: the kernel silently ignores it on a file that has a layout.
    """
    os.setxattr(path, name, pack_lov(layout))


def pack_lov(layout: StripeLayout) -> bytes:
    """Encode a plain layout as the attribute. Raises ValueError for one of several components."""
    component = layout[0]
    if len(layout) > 1 or component.on_mdt or component.end is not None:
        raise ValueError("a layout of several components is set by lfs only")
    count = _ANY if component.count == ALL_OSTS else component.count
    head = _HEADER.pack(_V3 if component.pool else _V1, _RAID0, bytes(16), component.size or 0, count, _ANY)
    if not component.pool:
        return head
    pool = component.pool.rpartition(".")[2].encode()
    if len(pool) > _LONGEST_POOL:
        raise ValueError(f"pool {component.pool!r}: the name is longer than {_LONGEST_POOL} bytes")
    return head + _POOL.pack(pool)
