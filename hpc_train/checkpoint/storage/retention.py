"""Remove old checkpoints and what dead processes left. A rename comes before the deletion: none is ever half there."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from hpc_train.checkpoint.errors import CheckpointError, UnreadableError
from hpc_train.checkpoint.format.manifest import Manifest, read_manifest
from hpc_train.checkpoint.storage.file_system import sync_directory
from hpc_train.checkpoint.storage.step_directory import explain_bad_step, find_steps, parse_step, uncommitted_path
from hpc_train.regular_files import is_plain_directory
from hpc_train.runtime.processes import identify_machine, is_process_id_used

_log = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"step-[0-9]+\.(tmp|trash)-(.+)")
_LEASE_SECONDS = 2 * 3600
"""A temporary directory of another host is dead if nothing in it changed for this long; clocks may be an hour apart."""


@dataclass(frozen=True)
class KeepRules:
    """What is kept beside the newest."""

    every: int = 0
    """Those whose step is a multiple of it; 0: none."""
    best: int = 0
    """So many of those with the lowest validation loss."""
    always: frozenset[int] = frozenset()
    """These steps, whatever is thought of them: that which the run went on from."""


def prune_steps(directory: Path, keep: int, also: KeepRules = KeepRules(), sole: bool = False) -> list[int]:
    """Keep the `keep` newest good checkpoints and what `also` says, remove all others and what dead processes left.

    For one process a run. Newest by the order of commits, not by step. Good is what is not marked bad, has neither NaN
    nor infinity, a sound manifest and files of the right size; as long as there are fewer than `keep` good ones nothing
    committed is removed, except steps with NaN or infinity that are older than another such step, so that a run whose
    loss is lost does not fill the disk. The newest complete step that is not good stays, for inspection, if it is newer
    than all good ones; so does any step that cannot be read just now. sole: see `sweep`.

    Returns the steps removed. What cannot be removed is logged and left for the next time.
    """
    sweep_leftovers(directory, sole)
    steps = find_steps(directory)
    return [step for step in list_prunable_steps(directory, keep, also) if discard_step(steps[step])]


def list_prunable_steps(directory: Path, keep: int, also: KeepRules = KeepRules()) -> list[int]:
    """The steps that `prune` would remove."""
    assert keep >= 1, keep
    steps = find_steps(directory)
    looks = {step: _inspect_step(path, step) for step, path in steps.items()}
    in_order = sorted((it for it in looks.values() if isinstance(it, _WholeStep)), key=lambda it: it.manifest.sequence)
    good = [it.manifest for it in in_order if not it.poisoned]
    if len(good) < keep:
        not_finite = [it.manifest.step for it in in_order if not it.manifest.finite]
        return sorted(set(not_finite[:-1]) - also.always)
    stay = {*(it.step for it in good[-keep:]), *_select_best(good, also.best), *also.always, in_order[-1].manifest.step}
    stay |= {it.step for it in good if also.every and it.step % also.every == 0}
    return sorted(step for step, look in looks.items() if step not in stay and look is not None)


@dataclass(frozen=True)
class _WholeStep:
    """A step that has all its bytes, as far as names and sizes tell."""

    manifest: Manifest
    poisoned: bool


def _select_best(good: list[Manifest], count: int) -> list[int]:
    """The lowest validation losses; of equal ones the newest."""
    scores = [(it.validation_loss, -it.sequence, it.step) for it in good if it.validation_loss is not None]
    return [step for *_, step in sorted(scores)[:count]]


def _inspect_step(path: Path, step: int) -> _WholeStep | str | None:
    """Why it is damaged, if it is; None if the file system does not say.

    Once: what is decided must not hang on a file that can be read at one look and not at the next.
    """
    try:
        manifest = read_manifest(path, step)
        if any(_size(path / file.name) != file.bytes for file in manifest.files):
            return "size"
        return _WholeStep(manifest, explain_bad_step(path, manifest) is not None)
    except UnreadableError:
        return None
    except (CheckpointError, FileNotFoundError) as error:
        return str(error)
    except OSError:
        return None


def _size(path: Path) -> int:
    """Return the size of a regular file; -1 for anything else. Raises OSError."""
    found = path.lstat()
    return found.st_size if S_ISREG(found.st_mode) else -1


def discard_step(path: Path) -> bool:
    """Take a committed directory away: one rename, then its files. Returns whether it is no longer committed.

    The rename is on the disk before any file goes: after a power cut a checkpoint that has its name has its files.
    """
    trash = uncommitted_path(path, "trash", make_token())
    try:
        path.rename(trash)
    except OSError as error:
        _log.warning("checkpoint: %s could not be removed: %s", path, error)
        return False
    with suppress(OSError):  # what is left is trash, for a later sweep
        sync_directory(path.parent)
        remove_tree(trash)
    return True


def remove_tree(path: Path) -> None:
    """Delete a directory, or anything else of that name; of a link only the link. What cannot be deleted stays."""
    with suppress(OSError):
        if is_plain_directory(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def sweep_leftovers(directory: Path, sole: bool = False) -> None:
    """Delete what is certainly dead: trash, temporary directories whose writer is gone, replaced steps.

    sole: the caller has the lock and is not saving, so all temporary directories are dead. Raises OSError.
    """
    steps = find_steps(directory)
    with suppress(FileNotFoundError):
        for path in list(directory.iterdir()):
            step = parse_step(path)
            if is_dead_leftover(path, sole):
                remove_tree(path)
            elif step is not None and steps.get(step, path) != path:
                discard_step(path)


def withdraw_unfinished(directory: Path) -> None:
    """Rename all temporary directories, so that whoever writes there cannot commit any of them.

    For one process that has just got the lock. A commit is one rename of such a directory: either it came before, and
    the step is there, or it fails. The renamed directories are trash for a later sweep. Raises OSError.
    """
    for path in list(directory.glob("step-*.tmp-*")):
        with suppress(FileNotFoundError):
            path.rename(uncommitted_path(path, "trash", make_token()))


def is_dead_leftover(path: Path, sole: bool = False) -> bool:
    """Whether this is trash, or a temporary directory whose writer is gone. sole: see `sweep`."""
    leftover = _LEFTOVER.fullmatch(path.name)
    return leftover is not None and (sole or leftover[1] == "trash" or _is_abandoned(path, leftover[2]))


def make_token() -> str:
    """Return a unique token that names its owner: `<host>.<process id>.<random>.<machine>`; see `_is_abandoned`."""
    return f"{_host_name()}.{os.getpid()}.{secrets.token_hex(4)}.{_hash_machine()}"


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())


def _hash_machine() -> str:
    """Return a few digits for this boot and process-id namespace: a process id means something only within it."""
    return hashlib.blake2s(identify_machine().encode(), digest_size=6).hexdigest()


def _is_abandoned(path: Path, token: str) -> bool:
    """Return whether its process is gone or, if that cannot be seen from here, nothing in it has changed for long.

    Tokens of earlier releases do not name the machine: for these only time tells.
    """
    host, _, rest = token.partition(".")
    process, _, rest = rest.partition(".")
    here = host == _host_name() and rest.partition(".")[2] == _hash_machine()
    # One of this process is abandoned too: it saves one at a time, and not while it sweeps.
    if here and process.isdecimal() and (int(process) == os.getpid() or not is_process_id_used(int(process))):
        return True
    return time.time() - _last_change(path) > _LEASE_SECONDS


def _last_change(path: Path) -> float:
    try:
        return max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
    except OSError:
        return time.time()  # it is going away under our eyes: somebody else is at it
