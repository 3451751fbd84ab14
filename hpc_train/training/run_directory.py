"""Paths of a run directory, its permissions, and whether a config may continue the run in it."""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train.config.plain_config import config_to_dict, config_to_yaml, flatten_settings
from hpc_train.config.run import RunConfig
from hpc_train.config.run_file import POINTS_FILE, load_run_file
from hpc_train.errors import UserError
from hpc_train.regular_files import write_private_file
from hpc_train.training.records.run_records import REQUEUE_MARKER, find_last_saved_step, read_metrics
from hpc_train.units import join_first

_MAY_DIFFER = re.compile(
    r"run_dir$|(cluster|parallel|launch|container|resilience|checkpoint|plan|loggers|profile)\.|train\.(steps|epochs|micro_batch"
    r"|eval_\w+|log_every|loss_chunk|tensorboard|deterministic|noise_scale\.\w+)$|data\.cache$|(model|data)\.source|model\.attention$"
)
"""Settings that a continued run may change: they say where and how fast it runs, not what it computes."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run's files."""

    path: Path
    checkpoints: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def job(self) -> Path:
        """The frozen job: configuration, degrees and code."""
        return self.path / "job.json"

    @property
    def plan(self) -> Path:
        """The plan by which parallel=auto chose its degrees."""
        return self.path / "plan.json"

    @property
    def schedule(self) -> Path:
        """Pipeline schedule, if the user gave a file with one."""
        return self.path / "schedule.csv"

    @property
    def rank_map(self) -> Path:
        """Which process of the newest attempt has which rank."""
        return self.path / "rankmap.json"

    @property
    def metrics(self) -> Path:
        """A line for each step; a resumed run cuts off the steps that it does again."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Events of the run in order, a line each; only appended to."""
        return self.path / "events.jsonl"

    @property
    def skipped(self) -> Path:
        """Steps whose update was skipped; absent if there was none."""
        return self.path / "skipped.json"

    @property
    def submitit(self) -> Path:
        """submitit's own files."""
        return self.path / ".submitit"

    def logs(self, attempt: int) -> Path:
        """The folder of the logs of an attempt."""
        return self.path / "logs" / str(attempt)

    def log(self, attempt: int, task: int) -> Path:
        """The log of one process of an attempt."""
        return self.logs(attempt) / f"task-{task}.log"

    def step_records(self, attempt: int, node: int) -> Path:
        """Return the file in which the ranks of a node record their steps."""
        return self.logs(attempt) / f"steps-node-{node}.bin"

    def requeue_marker(self, attempt: int) -> Path:
        """Return the marker of ranks that have saved and stopped on purpose; the batch script then requeues the job."""
        return self.logs(attempt) / REQUEUE_MARKER

    def done_marker(self, attempt: int) -> Path:
        """Return the marker that rank 0 leaves after the last step.

        srun may exit with 0 also when a time limit ended its step, so its exit code does not say that a run is done.
        """
        return self.logs(attempt) / "done"

    def steps(self) -> list[int]:
        """Return the steps that have a committed checkpoint, sorted; they are not verified."""
        matches = (re.fullmatch(r"step-(\d+)", entry.name) for entry in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in matches if match)


def locate_run_directory(config: RunConfig) -> RunDirectory:
    """Return the paths of this run without creating any. An unset run_dir becomes runs/<date>/<time>."""
    now = datetime.now()
    path = Path(config.run_dir or f"runs/{now:%Y-%m-%d}/{now:%H-%M-%S-%f}"[:-3]).expanduser().absolute()
    checkpoints = Path(config.checkpoint.dir).expanduser().absolute() if config.checkpoint.dir else path / "checkpoints"
    return RunDirectory(path, checkpoints)


def prepare_run_directory(directory: RunDirectory, config: RunConfig) -> None:
    """Create the run directory (mode 0700) and write config.yaml.

    Raises UserError if it cannot be created, or holds something else, or a run that this config may not continue.
    """
    check_owner(directory.path)
    _check_is_run(directory)
    if config.checkpoint.resume == "auto":
        if not directory.steps():
            check_nothing_was_saved(directory)
        elif directory.config.exists():
            check_same_config(directory, config)
    if config.checkpoint.dir and config.checkpoint.every:
        _make_checkpoint_directory(directory, config)
    try:
        directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.path.chmod(0o700)
        (directory.path / "logs").mkdir(mode=0o700, exist_ok=True)
        write_private_file(directory.config, config_to_yaml(config))
    except OSError as error:
        raise UserError(
            f"run_dir={directory.path}: {error.strerror}; choose a directory that can be written"
        ) from error


def check_nothing_was_saved(directory: RunDirectory) -> None:
    """Raise UserError if the run has saved: its checkpoints are gone, as where their file system is not mounted.

    To start over would look like a success, and would drop what the run has recorded.
    """
    saved = find_last_saved_step(directory.events)
    if saved is not None:
        raise UserError(
            f"{directory.checkpoints}: no checkpoint is there, and the run has saved step {saved}; mount its file "
            "system, or bring them back; checkpoint.resume=never or `hpc-train resume --mode force` starts over"
        )


def find_lost_checkpoint(directory: RunDirectory) -> int | None:
    """Return the step that the run has saved last, if its directory is gone; None if it is there.

    A step that a rollback has marked bad may have been removed since.
    """
    saved = find_last_saved_step(directory.events)
    return saved if saved is not None and saved not in directory.steps() else None


def check_owner(path: Path) -> None:
    """Raise UserError if an existing run directory belongs to another user, even when running as root.

    A link to it must not either, unless it is root's: its owner could redirect it at any time.
    """
    with suppress(OSError):  # not there yet, or not readable, which the first write will report
        target_owner, link = path.stat().st_uid, path.lstat().st_uid
        if target_owner != os.geteuid() or link not in (target_owner, 0):
            other = target_owner if target_owner != os.geteuid() else link
            raise UserError(
                f"run_dir={path}: belongs to {_user_name(other)}, and this is {_user_name(os.geteuid())}; "
                "choose a directory of your own"
            )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


@contextmanager
def make_files_private() -> Iterator[None]:
    """Inside this context, new files and directories are private to their owner; child processes inherit it."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_submitit_directory(directory: RunDirectory) -> None:
    """Make submitit's directory, and make an existing one private."""
    directory.submitit.mkdir(mode=0o700, exist_ok=True)
    directory.submitit.chmod(0o700)


def _check_is_run(directory: RunDirectory) -> None:
    """Raise UserError if the directory holds something else than a run; its files and its mode stay as they are."""
    names = {entry.name for entry in directory.path.iterdir()} if directory.path.is_dir() else set()
    names.discard(".lock")  # of the submission that makes it
    if POINTS_FILE in names:
        raise UserError(
            f"run_dir={directory.path}: holds a sweep; choose a new directory, or that of one of its points"
        )
    if names and not names & {"job.json", "logs", "checkpoints"}:
        raise UserError(f"run_dir={directory.path}: holds {min(names)} and no run; choose a new or an empty directory")


def _make_checkpoint_directory(directory: RunDirectory, config: RunConfig) -> None:
    """Create checkpoint.dir now, so that a run cannot compute what it then cannot save."""
    try:
        directory.checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"checkpoint.dir={directory.checkpoints}: {error.strerror}; choose a directory that can be written"
        ) from error


def make_attempt(directory: RunDirectory) -> int:
    """Create the log directory of the next attempt; returns its number. Two processes never get the same one."""
    attempt = 0
    while True:
        try:  # mkdir fails for all but one process: no lock is needed
            directory.logs(attempt).mkdir(mode=0o700, parents=True)
            return attempt
        except FileExistsError:
            attempt += 1


def remove_refused_run(directory: RunDirectory, dated: bool) -> None:
    """Remove a new run directory whose ranks refused the run in or before its first step; one with results stays.

    dated: it is runs/<date>/<time>, whose parents go too if they hold no other run.
    """
    if directory.steps() or read_metrics(directory.metrics):
        return
    shutil.rmtree(directory.path, ignore_errors=True)
    with suppress(OSError):
        for parent in directory.path.parents[: 2 * dated]:
            parent.rmdir()


def check_same_config(directory: RunDirectory, config: RunConfig) -> None:
    """Raise UserError, naming the settings, if the run in this directory was made with another config."""
    old = _flatten_run(load_run_file(directory.config))
    new = _flatten_run(config_to_dict(config))
    differing = [key for key in sorted(old | new) if not _MAY_DIFFER.match(key) and old.get(key) != new.get(key)]
    if not (old.get("data.path") and new.get("data.path")):
        differing = [key for key in differing if key != "data.path"]  # built by the ranks: the sources say what it is
    if _has_moved(old.get("model.path"), new.get("model.path")):  # with a tokenizer in it, perhaps
        moved_keys = {"model.path"} | ({"data.tokenizer"} if old.get("data.tokenizer") == old["model.path"] else set())
        differing = [key for key in differing if key not in moved_keys]
    if differing:
        differences = [f"{key} is {new.get(key)} and was {old.get(key)}" for key in differing]
        raise UserError(
            f"run_dir={directory.path}: holds another run: {join_first(differences, 3)}; use a new run_dir, or the old "
            "values"
        )


def _has_moved(old: str | None, new: str | None) -> bool:
    """Whether a model's folder is no longer where it was, or was given relative to a folder: then a new path may be it.

    The checkpoint has the weights, or a digest of them: a folder of another model is noticed when the step is loaded.
    """
    if not old or not new:
        return False
    return not Path(old).expanduser().is_dir() or Path(old).expanduser().absolute() == Path(new).expanduser().absolute()


def _flatten_run(container: dict[str, Any]) -> dict[str, Any]:
    settings = flatten_settings(container)
    if settings.get("data.path"):  # a token store's name says what is in it, its folder does not
        settings["data.path"] = Path(settings["data.path"]).name
    return settings
