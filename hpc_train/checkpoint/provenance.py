"""Record what made a step and how long it took.

The manifest keeps this for people; no decision depends on it. `identify_code` hashes this package, `SaveTimer`
measures the parts of a save on one rank.
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
    """Version of hpc_train."""
    code: str
    """Hash of the package (see hash_code)."""
    config: str | None = None
    """Hash of the run's config.yaml."""
    model: str | None = None
    """Hash of the Python file that defines a custom model."""
    attempt: int | None = None
    """Attempt of the run (see logs/<attempt>)."""

    def differs(self, other: Origin) -> list[str]:
        """List the differences between two codes, for messages."""
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
    """Seconds of the parts of a save as rank 0 measured them, in order: copy, prepare, write, agree, commit."""

    at: float
    """Start of the save: seconds since the epoch by the clock of rank 0's node."""
    stall: float
    """Seconds for which the training waited."""
    copy: float
    """Copy of the state to host memory, overlapped with the training or not."""
    prepare: float
    """Until all ranks had met and the directory was made."""
    write: float
    """Until the files of the slowest rank were synchronised."""
    slowest_rank: int
    agree: float
    """From then until rank 0 had the reports of all ranks."""
    commit: float | None = None
    """Manifest, index and rename; None in the manifest itself, which is written before the commit ends."""


@dataclass
class SaveTimer:
    """Measures the parts of a save on one rank."""

    started: float
    """time.monotonic() when the save was called."""
    seconds: dict[str, float] = field(default_factory=dict)
    times: SaveTimes | None = None
    """Set on rank 0 when all ranks have written."""

    def lap(self, part: str) -> None:
        """End a part and begin the next."""
        self.seconds[part] = time.monotonic() - self.started - sum(self.seconds.values())

    def all_written(self, stall: float, writes: Sequence[float]) -> SaveTimes:
        """Return the times on rank 0 when all ranks have written.

        stall: seconds for which its training waited. writes: seconds of every rank.
        """
        self.lap("agree")
        write = min(max(writes), self.seconds["agree"])  # another rank may have begun before rank 0 did
        at = time.time() - (time.monotonic() - self.started)
        agree = self.seconds["agree"] - write
        copy, prepare = self.seconds["copy"], self.seconds["prepare"]
        self.times = SaveTimes(
            at=at,
            stall=stall,
            copy=copy,
            prepare=prepare,
            write=write,
            slowest_rank=list(writes).index(max(writes)),
            agree=agree,
        )
        return self.times

    def committed(self) -> SaveTimes | None:
        """Return the times with that of the commit, on rank 0; None on other ranks."""
        self.lap("commit")
        return None if self.times is None else replace(self.times, commit=self.seconds["commit"])


def identify_code() -> tuple[str, str]:
    """Return (version, hash) of the running hpc_train."""
    return __version__, hash_code(PACKAGE_DIRECTORY)


@cache
def hash_code(package: Path) -> str:
    """Return the sha256 of the names and contents of all Python files below a folder, sorted by name; cached."""
    state = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        state.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return state.hexdigest()


def hash_file(path: Path) -> str:
    """Return the sha256 of a file. Raises OSError."""
    return hashlib.sha256(read_regular(path, MAX_TEXT_BYTES, follow=True)).hexdigest()


def hash_text(text: str) -> str:
    """Return the sha256 of a text encoded as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def encode_provenance(record: Origin | SaveTimes) -> dict[str, Any]:
    """Return the fields that are set, for the manifest."""
    return {name: value for name, value in asdict(record).items() if value is not None}


def parse_origin(body: dict[str, Any] | None) -> Origin | None:
    """Parse the origin in a manifest; unknown keys, from later releases, are ignored.

    Raises KeyError, TypeError or ValueError if it is malformed.
    """
    if body is None:
        return None
    fields = dict(body)  # raises for a body that is no object
    config, model, attempt = (fields.get(key) for key in ("config", "model", "attempt"))
    return Origin(str(fields["version"]), str(fields["code"]), config, model, None if attempt is None else int(attempt))


def parse_times(body: dict[str, Any] | None) -> SaveTimes | None:
    """Parse the times in a manifest; unknown keys are ignored. Raises as parse_origin."""
    if body is None:
        return None
    seconds = {name: float(body[name]) for name in ("at", "stall", "copy", "prepare", "write", "agree")}
    return SaveTimes(**seconds, slowest_rank=int(body["slowest_rank"]))


def _describe_version(version: str, digest: str | None) -> str:
    return f"{version} ({digest[:12]})" if version and digest else (digest or "")[:12]
