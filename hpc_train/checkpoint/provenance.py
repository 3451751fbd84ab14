"""Record what made a step and how long it took.

The manifest keeps it for people; nothing is ever chosen or ordered by it. `identify_code` hashes this package,
`SaveTimer` measures the parts of a save on one rank.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hpc_train import __version__
from hpc_train.regular_files import MAX_TEXT_BYTES, read_regular

PACKAGE_DIRECTORY = Path(__file__).parents[1]


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
            words.append(
                f"hpc_train {_describe_version(self.version, self.code)} in place of "
                f"{_describe_version(other.version, other.code)}"
            )
        if self.model != other.model and None not in (self.model, other.model):
            words.append(
                f"the model's file {_describe_version('', self.model)} in place of {_describe_version('', other.model)}"
            )
        return words


@dataclass(frozen=True)
class SaveTimes:
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
class SaveTimer:
    """Measures them, on one rank."""

    started: float
    """time.monotonic() when the save was called."""
    seconds: dict[str, float] = field(default_factory=dict)
    times: SaveTimes | None = None
    """On rank 0, once all ranks have written."""

    def lap(self, part: str) -> None:
        """The end of a part, and the beginning of the next."""
        self.seconds[part] = time.monotonic() - self.started - sum(self.seconds.values())

    def all_written(self, stall: float, writes: Sequence[float]) -> SaveTimes:
        """On rank 0. stall: of its training. writes: seconds of every rank."""
        self.lap("agree")
        write = min(max(writes), self.seconds["agree"])  # another rank may have begun before rank 0 did
        at = time.time() - (time.monotonic() - self.started)
        agree = self.seconds["agree"] - write
        copy, prepare = self.seconds["copy"], self.seconds["prepare"]
        self.times = SaveTimes(at, stall, copy, prepare, write, list(writes).index(max(writes)), agree)
        return self.times

    def committed(self) -> SaveTimes | None:
        """All of them, on rank 0."""
        self.lap("commit")
        return None if self.times is None else replace(self.times, commit=self.seconds["commit"])


def identify_code() -> tuple[str, str]:
    """(version, hash) of the hpc_train that runs."""
    return __version__, hash_code(PACKAGE_DIRECTORY)


@cache
def hash_code(package: Path) -> str:
    """sha256 over the names and contents of all Python files below a folder, in the order of their names; read once."""
    state = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        state.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return state.hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file. Raises OSError."""
    return hashlib.sha256(read_regular(path, MAX_TEXT_BYTES, follow=True)).hexdigest()


def hash_text(text: str) -> str:
    """sha256 of a text as it is written to a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def encode_provenance(it: Origin | SaveTimes) -> dict[str, Any]:
    """What is known of it."""
    return {name: value for name, value in asdict(it).items() if value is not None}


def parse_origin(body: dict[str, Any] | None) -> Origin | None:
    """Of a manifest. Later releases may say more. Raises KeyError, TypeError or ValueError if it is none."""
    if body is None:
        return None
    known = dict(body)
    config, model, attempt = (known.get(key) for key in ("config", "model", "attempt"))
    return Origin(str(known["version"]), str(known["code"]), config, model, None if attempt is None else int(attempt))


def parse_times(body: dict[str, Any] | None) -> SaveTimes | None:
    """The same of the times."""
    if body is None:
        return None
    seconds = {name: float(body[name]) for name in ("at", "stall", "copy", "prepare", "write", "agree")}
    return SaveTimes(**seconds, slowest_rank=int(body["slowest_rank"]))


def _describe_version(version: str, digest: str | None) -> str:
    return f"{version} ({digest[:12]})" if version and digest else (digest or "")[:12]
