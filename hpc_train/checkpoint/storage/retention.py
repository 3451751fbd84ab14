"""Remove old checkpoints and leftovers of dead processes.

A step is renamed before it is deleted, so that no committed step is ever incomplete.
"""

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
from hpc_train.checkpoint.storage.step_directory import explain_bad_step, find_steps, parse_step, uncommitted_path
from hpc_train.processes import identify_machine, is_process_id_used
from hpc_train.regular_files import is_plain_directory, sync_directory

_log = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"step-[0-9]+\.(tmp|trash)-(.+)")
_LEASE_SECONDS = 2 * 3600
"""A temporary directory of another host is dead if nothing in it changed for this long; clocks may be an hour apart."""


@dataclass(frozen=True)
class KeepRules:
    """Which steps are kept beside the newest."""

    every: int = 0
    """Keep steps that are multiples of it; 0: none."""
    best: int = 0
    """Keep this many steps with the lowest validation loss."""
    always: frozenset[int] = frozenset()
    """Steps that are kept in any case, such as the one that the run resumed from."""


def prune_steps(directory: Path, keep: int, also: KeepRules = KeepRules(), sole: bool = False) -> list[int]:
    """Remove all but the `keep` newest good steps and those of `also`, and remove leftovers; returns the steps removed.

    Called by one process of a run. Steps count as newer by the order of their commits, not by number. A step is good if
    it is not marked bad, has neither NaN nor infinity, a sound manifest and files of the right size. While there are
    fewer than `keep` good steps no committed step is removed, except those with NaN or infinity that are older than
    another such step, so that a diverged run does not fill the disk. The newest complete step stays even if it is not
    good, for inspection, and so does any step that cannot be read just now. What cannot be removed is logged and left
    for the next time. sole: see sweep_leftovers.
    """
    sweep_leftovers(directory, sole)
    steps = find_steps(directory)
    return [step for step in list_prunable_steps(directory, keep, also) if discard_step(steps[step])]


def list_prunable_steps(directory: Path, keep: int, also: KeepRules) -> list[int]:
    """Return the steps that prune_steps would remove."""
    assert keep >= 1, keep
    steps = find_steps(directory)
    contents = {step: _inspect_step(path, step) for step, path in steps.items()}
    complete = [content for content in contents.values() if isinstance(content, _WholeStep)]
    in_order = sorted(complete, key=lambda content: content.manifest.sequence)
    good = [content.manifest for content in in_order if not content.bad]
    # Too few good steps to choose from: remove only those with NaN or infinity, but leave the newest to look at.
    if len(good) < keep:
        not_finite = [content.manifest.step for content in in_order if not content.manifest.finite]
        return sorted(set(not_finite[:-1]) - also.always)
    newest = {manifest.step for manifest in good[-keep:]}
    stay = {*newest, *_select_best(good, also.best), *also.always, in_order[-1].manifest.step}
    stay |= {manifest.step for manifest in good if also.every and manifest.step % also.every == 0}
    return sorted(step for step, content in contents.items() if step not in stay and content is not None)


@dataclass(frozen=True)
class _WholeStep:
    """A step whose files all exist and have the right size."""

    manifest: Manifest
    bad: bool
    """Marked bad, or with NaN or infinity."""


def _select_best(good: list[Manifest], count: int) -> list[int]:
    """Return the steps with the lowest validation losses, of equal ones the newest."""
    scores = [
        (manifest.validation_loss, -manifest.sequence, manifest.step)
        for manifest in good
        if manifest.validation_loss is not None
    ]
    return [step for *_, step in sorted(scores)[:count]]


def _inspect_step(path: Path, step: int) -> _WholeStep | str | None:
    """Return the step, or why it is damaged; None if it cannot be read just now.

    Called once for each step: the decision must not depend on a file that can be read at one time and not at the next.
    """
    try:
        manifest = read_manifest(path, step)
        if any(_measure_size(path / file.name) != file.bytes for file in manifest.files):
            return "size"
        return _WholeStep(manifest, explain_bad_step(path, manifest) is not None)
    except UnreadableError:
        return None
    except (CheckpointError, FileNotFoundError) as error:
        return str(error)
    except OSError:
        return None


def _measure_size(path: Path) -> int:
    """Return the size of a regular file; -1 for anything else. Raises OSError."""
    status = path.lstat()
    return status.st_size if S_ISREG(status.st_mode) else -1


def discard_step(path: Path) -> bool:
    """Rename a committed directory to trash and delete it; returns whether it is no longer committed.

    The rename is synchronised before any file is deleted: after a power loss, a step with its final name is complete.
    """
    trash = uncommitted_path(path, "trash", make_token())
    try:
        path.rename(trash)
    except OSError as error:
        _log.warning("checkpoint: %s could not be removed: %s", path, error)
        return False
    with suppress(OSError):  # what is left is trash, which a later sweep deletes
        sync_directory(path.parent)
        remove_tree(trash)
    return True


def remove_tree(path: Path) -> None:
    """Delete a directory or a file; a link is deleted, not its target. What cannot be deleted stays."""
    with suppress(OSError):
        if is_plain_directory(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def sweep_leftovers(directory: Path, sole: bool) -> None:
    """Delete trash, temporary directories of dead writers, and replaced steps.

    sole: the caller has the lock and is not saving, so all temporary directories are leftovers. Raises OSError.
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
    """Rename all temporary directories to trash, so that former owners of the lock cannot commit them.

    Called by a process that has just taken the lock. A commit is one rename of such a directory: either it came before,
    and the step is committed, or it fails. Raises OSError.
    """
    for path in list(directory.glob("step-*.tmp-*")):
        with suppress(FileNotFoundError):
            path.rename(uncommitted_path(path, "trash", make_token()))


def is_dead_leftover(path: Path, sole: bool = False) -> bool:
    """Return whether this is trash, or a temporary directory whose writer is gone. sole: see sweep_leftovers."""
    leftover = _LEFTOVER.fullmatch(path.name)
    return leftover is not None and (sole or leftover[1] == "trash" or _is_abandoned(path, leftover[2]))


def make_token() -> str:
    """Return a unique token that names its owner: `<host>.<process id>.<random>.<machine>`; see `_is_abandoned`."""
    return f"{_read_host_name()}.{os.getpid()}.{secrets.token_hex(4)}.{_hash_machine()}"


def _read_host_name() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())


def _hash_machine() -> str:
    """Return a short hash of this boot and process-id namespace, within which process ids are unique."""
    return hashlib.blake2s(identify_machine().encode(), digest_size=6).hexdigest()


def _is_abandoned(path: Path, token: str) -> bool:
    """Return whether the process of a temporary directory is gone.

    If the process ran on another machine, the directory is abandoned when nothing in it has changed for _LEASE_SECONDS.
    """
    host, _, rest = token.partition(".")
    process, _, rest = rest.partition(".")
    # A process id says something only within one boot and one process-id namespace.
    here = host == _read_host_name() and rest.partition(".")[2] == _hash_machine()
    # A directory of this process is abandoned too: it runs one save at a time, and does not sweep during one.
    if here and process.isdecimal() and (int(process) == os.getpid() or not is_process_id_used(int(process))):
        return True
    return time.time() - _find_last_change(path) > _LEASE_SECONDS


def _find_last_change(path: Path) -> float:
    try:
        return max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
    except OSError:
        return time.time()  # another process is removing it
