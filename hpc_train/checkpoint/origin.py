"""What made a step, and how long it took: told by the manifest, for people. Nothing is ever chosen or ordered by it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hpc_train import __version__
from hpc_train.regular_files import TEXT, read_regular

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Origin:
    """The code and the config of a run; hashes are sha256 in hexadecimal."""

    version: str
    """Of hpc_train."""
    code: str
    """See code_hash."""
    config: str | None = None
    """Of the run's config.yaml."""
    model: str | None = None
    """Of the Python file that a custom model comes from."""
    attempt: int | None = None
    """Of the run (see logs/<attempt>)."""

    def differs(self, other: Origin) -> list[str]:
        """What of the code is not the same, in words."""
        words = []
        if (self.version, self.code) != (other.version, other.code):
            words.append(f"hpc_train {_named(self.version, self.code)} in place of {_named(other.version, other.code)}")
        if self.model != other.model and None not in (self.model, other.model):
            words.append(f"the model's file {_named('', self.model)} in place of {_named('', other.model)}")
        return words


@dataclass(frozen=True)
class Times:
    """The parts of a save in seconds, as rank 0 saw them, one after the other: copy, prepare, write, agree, commit."""

    at: float
    """When it began: seconds since the epoch by the clock of rank 0's node."""
    stall: float
    """For which the training waited."""
    copy: float
    """Until the state was copied, beside the training or not."""
    prepare: float
    """Until all ranks had met and the directory was there."""
    write: float
    """Of the slowest rank, its files on the disk."""
    slowest_rank: int
    agree: float
    """Until all others had been heard too."""
    commit: float | None = None
    """Manifest, index, rename; None where it is not over yet, as in the manifest itself."""


@dataclass
class Watch:
    """Measures them, on one rank."""

    started: float
    """time.monotonic() when the save was called."""
    seconds: dict[str, float] = field(default_factory=dict)
    times: Times | None = None
    """On rank 0, once all ranks have written."""

    def lap(self, part: str) -> None:
        """The end of a part, and the beginning of the next."""
        self.seconds[part] = time.monotonic() - self.started - sum(self.seconds.values())

    def all_written(self, stall: float, writes: Sequence[float]) -> Times:
        """On rank 0. stall: of its training. writes: seconds of every rank."""
        self.lap("agree")
        write = min(max(writes), self.seconds["agree"])  # another rank may have begun before rank 0 did
        at = time.time() - (time.monotonic() - self.started)
        agree = self.seconds["agree"] - write
        copy, prepare = self.seconds["copy"], self.seconds["prepare"]
        self.times = Times(at, stall, copy, prepare, write, list(writes).index(max(writes)), agree)
        return self.times

    def committed(self) -> Times | None:
        """All of them, on rank 0."""
        self.lap("commit")
        return None if self.times is None else replace(self.times, commit=self.seconds["commit"])


def this_code() -> tuple[str, str]:
    """(version, hash) of the hpc_train that runs."""
    return __version__, code_hash(PACKAGE)


@cache
def code_hash(package: Path) -> str:
    """sha256 over the names and contents of all Python files below a folder, in the order of their names; read once."""
    state = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        state.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return state.hexdigest()


def file_hash(path: Path) -> str:
    """sha256 of a file. Raises OSError."""
    return hashlib.sha256(read_regular(path, TEXT, follow=True)).hexdigest()


def text_hash(text: str) -> str:
    """sha256 of a text as it is written to a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(it: Origin | Times) -> dict[str, Any]:
    """What is known of it."""
    return {name: value for name, value in asdict(it).items() if value is not None}


def origin_from(body: dict[str, Any] | None) -> Origin | None:
    """Of a manifest. Later releases may say more. Raises KeyError, TypeError or ValueError if it is none."""
    if body is None:
        return None
    known = dict(body)
    config, model, attempt = (known.get(key) for key in ("config", "model", "attempt"))
    return Origin(str(known["version"]), str(known["code"]), config, model, None if attempt is None else int(attempt))


def times_from(body: dict[str, Any] | None) -> Times | None:
    """The same of the times."""
    if body is None:
        return None
    seconds = {name: float(body[name]) for name in ("at", "stall", "copy", "prepare", "write", "agree")}
    return Times(**seconds, slowest_rank=int(body["slowest_rank"]))


def _named(version: str, digest: str | None) -> str:
    return f"{version} ({digest[:12]})" if version and digest else (digest or "")[:12]
